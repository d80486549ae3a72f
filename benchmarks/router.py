"""What a router costs: requests per second and added latency of ours and of ``vllm-router``.

Both stand before the same two fake engines (one prefill, one decode) that answer at once, in the
same run, their turns interleaved with a turn without any router. Ours has API keys, metrics, the
request log and placement on; the peer runs in its prefill/decode mode without keys. Before anything
is timed the answers through both routers are compared with the engine's own. Ours keeps its default
bounds on prefill legs; the peer has none, and `--prefill-ahead 64` lifts ours. Client, engines and
routers share the machine's cores, so only ratios inside one run mean anything.

    python benchmarks/router.py --rounds 7 --output benchmarks/results/router.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from harness import fake_engines
from harness.fake_engines import MODEL, SECRET
from harness.http_load import ANSWER_TIMEOUT_S, Row, Target, load

KEY = "sk-benchmark"
START_TIMEOUT_S = 60.0

ROWS = [
    Row("c=1, stream, one write", 1, True),
    Row("c=64, stream, one write", 64, True),
    Row("c=1, non-stream", 1, False),
    Row("c=64, non-stream", 64, False),
    Row("c=1, stream, 2000-word prompt", 1, True, 2000),
    Row("c=64, stream, 2000-word prompt", 64, True, 2000),
]


# Correctness, and the summary


def answer_of(target: Target, row: Row) -> bytes:
    """The body of one answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{target.port}/v1/completions", data=row.body(), method="POST"
    )
    for line in target.headers.decode().splitlines():
        request.add_header(*line.split(": ", 1))
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        return bytes(response.read())


def check(targets: list[Target]) -> None:
    """Every router gives the engine's own answer in every row; raises ``ValueError`` otherwise."""
    for row in ROWS:
        expected = answer_of(targets[0], row)
        for target in targets[1:]:
            got = answer_of(target, row)
            same = got == expected or (
                not row.is_streaming
                and json.loads(got)["choices"] == json.loads(expected)["choices"]
            )
            if not same:
                raise ValueError(f"{row.name}: {target.name} answered {got!r} not {expected!r}")


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def summarise(row: Row, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Figures of each target, and ours against the peer round by round."""
    result: dict[str, Any] = {"row": row.name}
    for name, rounds in runs.items():
        result[name] = {key: spread([r[key] for r in rounds]) for key in rounds[0]}
    direct, ours, peer = runs["direct"], runs["ours"], runs["vllm-router"]
    triples = list(zip(direct, ours, peer, strict=True))
    result["throughput_ratio"] = spread(
        [o["requests_per_s"] / p["requests_per_s"] for _, o, p in triples]
    )
    added = [(o["p50_ms"] - d["p50_ms"], p["p50_ms"] - d["p50_ms"]) for d, o, p in triples]
    result["added_p50_ms_ours"] = spread([mine for mine, _ in added])
    result["added_p50_ms_peer"] = spread([its for _, its in added])
    result["added_p50_ratio"] = spread([mine / its for mine, its in added])
    return result


# Processes


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(stack: ExitStack, argv: list[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
    """A process that ends with the benchmark."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            argv, stdout=stream, stderr=subprocess.STDOUT, env=os.environ | env
        )
    stack.callback(process.wait, 10)
    stack.callback(process.terminate)
    return process


def wait_for(port: int, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until GET of that path answers 200."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise RuntimeError(f"port {port} does not answer {path}:\n{log.read_text()[-2000:]}")


def peer_command() -> str:
    """The peer's executable. Raises ``RuntimeError`` when it is not installed."""
    beside = Path(sys.executable).with_name("vllm-router")
    found = str(beside) if beside.exists() else shutil.which("vllm-router")
    if found is None:
        raise RuntimeError("vllm-router is not installed: pip install 'splitserve[dev]'")
    return found


def start_all(stack: ExitStack, folder: Path, prefill_ahead: int) -> tuple[list[Target], list[str]]:
    """Engines, routers and agents, all answering; and the peer's command line."""
    from splitserve.orchestrator.config import ClusterConfig, dump_resolved

    p_port, d_port, our_port, peer_port, peer_metrics = free_ports(5)
    this = [sys.executable, fake_engines.__file__]
    for port in (p_port, d_port):
        log = folder / f"engine-{port}.log"
        engine = start(stack, [*this, "engine", str(port)], log)
        wait_for(port, "/health", engine, log)
    config = ClusterConfig.model_validate(
        {
            "engine": "mock",
            "model": {"path": MODEL},
            "router": {"port": our_port, "prefill_ahead_requests": prefill_ahead},
            "security": {"api_keys": [{"tenant": "bench", "key_env": "BENCH_KEY"}]},
        }
    )
    resolved = folder / "resolved.json"
    resolved.write_text(dump_resolved(config))
    argv = [sys.executable, "-m", "splitserve.orchestrator.router", "--config", str(resolved)]
    our_log = folder / "ours.log"
    ours = start(stack, argv, our_log, SPLITSERVE_SECRET=SECRET, BENCH_KEY=KEY)
    wait_for(our_port, "/metrics", ours, our_log)
    agents = [*this, "agents", *map(str, (our_port, p_port, d_port))]
    start(stack, agents, folder / "agents.log")
    wait_for(our_port, "/health", ours, our_log)
    peer_argv = [
        peer_command(),
        "--vllm-pd-disaggregation",
        *("--prefill", f"http://127.0.0.1:{p_port}", "--decode", f"http://127.0.0.1:{d_port}"),
        *("--policy", "round_robin", "--kv-connector", "nixl", "--log-level", "warning"),
        *("--max-concurrent-requests", "1024", "--prometheus-port", str(peer_metrics)),
        *("--host", "127.0.0.1", "--port", str(peer_port)),
    ]
    peer_log = folder / "peer.log"
    peer = start(stack, peer_argv, peer_log)
    wait_for(peer_port, "/health", peer, peer_log)
    key = f"Authorization: Bearer {KEY}\r\n".encode()
    targets = [
        Target("direct", d_port, None),
        Target("ours", our_port, psutil.Process(ours.pid), key),
        Target("vllm-router", peer_port, psutil.Process(peer.pid)),
    ]
    return targets, peer_argv


def measure(rounds: int, seconds: float, only: str, prefill_ahead: int) -> dict[str, Any]:
    """The whole benchmark."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets, peer_argv = start_all(stack, folder, prefill_ahead)
        check(targets)
        print("answers through both routers equal the engine's own in every row")
        results = []
        for row in ROWS:
            if only not in row.name:
                continue
            runs: dict[str, list[dict[str, float]]] = {t.name: [] for t in targets}
            for target in targets:
                load(target, row, seconds / 3)
            for number in range(rounds):
                for place in range(len(targets)):
                    target = targets[(place + number) % len(targets)]
                    runs[target.name].append(load(target, row, seconds))
            results.append(summarise(row, runs))
            show(results[-1])
    worst_throughput = min(r["throughput_ratio"]["median"] for r in results)
    worst_latency = max(r["added_p50_ratio"]["median"] for r in results)
    print(f"worst row: {worst_throughput:.2f} of the peer's throughput (bar: at least 0.80)")
    print(f"worst row: {worst_latency:.2f} of its added p50 latency (bar: at most 1.30)")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "peer_command": shlex.join(["vllm-router", *peer_argv[1:]]),
        "rounds": rounds,
        "seconds_per_turn": seconds,
        "prefill_ahead_requests": prefill_ahead,
        "cpus": os.cpu_count(),
        "worst_throughput_ratio": worst_throughput,
        "worst_added_p50_ratio": worst_latency,
        "rows": results,
    }


def show(result: dict[str, Any]) -> None:
    """One row for people."""
    print(f"\n{result['row']}")
    for name in ("direct", "ours", "vllm-router"):
        r = result[name]
        rate, p50, p99 = r["requests_per_s"], r["p50_ms"], r["p99_ms"]
        print(
            f"  {name:12} {rate['median']:7.0f} [{rate['min']:.0f}-{rate['max']:.0f}] requests/s"
            f"  p50 {p50['median']:.2f} ms  p99 {p99['median']:.2f} ms"
            f"  router CPU {r['router_cpu_us_per_request']['median']:.0f} us per request"
        )
    for key in ("throughput_ratio", "added_p50_ratio"):
        s = result[key]
        print(f"  {key:18} {s['median']:.2f} [{s['min']:.2f}-{s['max']:.2f}]")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per row")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--prefill-ahead", type=int, default=1, help="prefill_ahead_requests")
    parser.add_argument("--output", type=Path, help="file for the results (JSON)")
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.seconds, arguments.only, arguments.prefill_ahead)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
