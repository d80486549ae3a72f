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
import asyncio
import json
import os
import select
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

KEY = "sk-benchmark"
SECRET = "5a" * 32
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
MODEL = "fake"
EVENTS = [
    b'data: {"id":"cmpl-x","object":"text_completion","created":1,"model":"fake","choices":'
    b'[{"index":0,"text":" token%02d","logprobs":null,"finish_reason":null}]}\n\n' % number
    for number in range(32)
]
DONE = b"data: [DONE]\n\n"
PLAIN = json.dumps(
    {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "text": " token" * 32, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 32, "total_tokens": 40},
        "kv_transfer_params": {
            "remote_engine_id": "e",
            "remote_block_ids": [1],
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        },
    }
).encode()


@dataclass(frozen=True)
class Row:
    """One load."""

    name: str
    concurrency: int
    is_streaming: bool
    prompt_words: int = 8
    has_bar: bool = True

    def body(self) -> bytes:
        """The request's JSON."""
        return json.dumps(
            {
                "model": MODEL,
                "prompt": " ".join(f"word{i % 97}" for i in range(self.prompt_words)),
                "max_tokens": 32,
                "temperature": 0,
                "stream": self.is_streaming,
            },
            separators=(",", ":"),
        ).encode()


ROWS = [
    Row("c=1, stream, one write", 1, True),
    Row("c=64, stream, one write", 64, True),
    Row("c=1, non-stream", 1, False),
    Row("c=64, non-stream", 64, False),
    Row("c=1, stream, 2000-word prompt", 1, True, 2000),
    Row("c=64, stream, 2000-word prompt", 64, True, 2000),
]


# The fake engines


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAMED = STREAM_HEAD + b"".join(map(_chunk, [*EVENTS, DONE])) + b"0\r\n\r\n"
UNSTREAMED = _plain(b"200 OK", PLAIN)
MODELS = _plain(b"200 OK", json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())
NOT_FOUND = _plain(b"404 Not Found", b"{}")


class FakeEngine(asyncio.Protocol):
    """Answers at once: a stream in one write, or a small JSON body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._held = b""

    def data_received(self, data: bytes) -> None:
        held = self._held + data
        while True:
            end = held.find(b"\r\n\r\n")
            if end < 0:
                break
            head = held[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(held) < end + 4 + size:
                break
            body, held = held[end + 4 : end + 4 + size], held[end + 4 + size :]
            self._answer(head, body)
        self._held = held

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post"):
            self._transport.write(STREAMED if b'"stream":true' in body else UNSTREAMED)
        elif head.startswith(b"get /metrics"):
            self._transport.write(NOT_FOUND)
        else:
            self._transport.write(MODELS)


async def serve_engine(port: int) -> None:
    """Until killed."""
    server = await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", port)
    await server.serve_forever()


async def serve_agents(router_port: int, prefill_port: int, decode_port: int) -> None:
    """Speak to our router for both engines, twice a second, until killed."""
    import aiohttp
    import msgspec

    from splitserve.orchestrator.agent.auth import agent_token
    from splitserve.orchestrator.agent.messages import AgentHello, NodeDescription, NodeState

    headers = {"Authorization": f"Bearer {agent_token(bytes.fromhex(SECRET))}"}
    url = f"http://127.0.0.1:{router_port}/internal/agents"
    blocks = 1_000_000

    async def speak(session: aiohttp.ClientSession, role: str, port: int) -> None:
        node = NodeDescription(
            node=role,
            pool=role,
            incarnation=role,
            engine_url=f"http://127.0.0.1:{port}",
            engine_api_key="engine-key",
            control_addresses=(f"tcp://127.0.0.1:{port + 1}",),
            model=MODEL,
            max_model_len=8192,
            block_tokens=16,
            total_blocks=blocks,
            tensor_parallel=1,
            transport="tcp",
            fingerprint={"weights": "w"},
        )
        state = NodeState(
            node=role, incarnation=role, phase="ready", free_blocks=blocks, total_blocks=blocks
        )
        async with session.ws_connect(url, headers=headers) as ws:
            await ws.send_str(msgspec.json.encode(AgentHello(description=node, role=role)).decode())
            while not ws.closed:
                await ws.send_str(msgspec.json.encode(state).decode())
                await asyncio.sleep(0.5)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(
            speak(session, "prefill", prefill_port), speak(session, "decode", decode_port)
        )


# The load


@dataclass
class Target:
    """Something that answers requests; the process whose CPU time is counted, if any."""

    name: str
    port: int
    process: psutil.Process | None
    headers: bytes = b""

    def request(self, row: Row) -> bytes:
        """One request as it goes over the wire."""
        body = row.body()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench\r\n"
            b"Accept: */*\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
            % (self.port, self.headers, len(body))
            + body
        )

    def cpu_s(self) -> float:
        """CPU time so far."""
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)


class Client:
    """One keep-alive connection that sends the same request again and again."""

    def __init__(self, target: Target, row: Row) -> None:
        self._socket = socket.create_connection(("127.0.0.1", target.port), ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = target.request(row)
        self._is_streaming = row.is_streaming
        self._answer = b""
        self._sent_at = 0.0

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self) -> None:
        """The next request."""
        self._answer = b""
        self._sent_at = time.perf_counter()
        self._socket.sendall(self._request)

    def read(self) -> float | None:
        """Seconds from request to the answer's end, None when it is not complete yet."""
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the connection was closed in the middle of an answer")
        self._answer = self._answer + data if self._answer else data
        if not self._is_complete():
            return None
        took = time.perf_counter() - self._sent_at
        if not self._answer.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"unexpected answer: {self._answer[:500]!r}")
        return took

    def _is_complete(self) -> bool:
        answer = self._answer
        if self._is_streaming:
            return answer.endswith(b"\r\n0\r\n\r\n")
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = answer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return answer.endswith(b"\r\n0\r\n\r\n")
        return len(answer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def load(target: Target, row: Row, seconds: float) -> dict[str, float]:
    """Keep ``row.concurrency`` requests out for that long."""
    clients = [Client(target, row) for _ in range(row.concurrency)]
    took: list[float] = []
    poll = select.epoll()
    by_fd = {client.fileno(): client for client in clients}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    cpu, start = target.cpu_s(), time.perf_counter()
    end = start + seconds
    for client in clients:
        client.send()
    out = len(clients)
    while out:
        ready = poll.poll(ANSWER_TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"{target.name}: no answer within {ANSWER_TIMEOUT_S} s")
        for fd, _ in ready:
            answered = by_fd[fd].read()
            if answered is not None:
                took.append(answered)
                if time.perf_counter() < end:
                    by_fd[fd].send()
                else:
                    out -= 1
    elapsed = time.perf_counter() - start
    cpu = target.cpu_s() - cpu
    poll.close()
    for client in clients:
        client.close()
    took.sort()
    return {
        "requests_per_s": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1000,
        "p99_ms": took[int(len(took) * 0.99)] * 1000,
        "router_cpu_us_per_request": cpu / len(took) * 1e6,
    }


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
    this = [sys.executable, str(Path(__file__).resolve())]
    for port in (p_port, d_port):
        log = folder / f"engine-{port}.log"
        engine = start(stack, [*this, "--engine", str(port)], log)
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
    agents = [*this, "--agents", f"{our_port},{p_port},{d_port}"]
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
    """Run the benchmark, or one of its helper processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per row")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--prefill-ahead", type=int, default=1, help="prefill_ahead_requests")
    parser.add_argument("--output", type=Path, help="file for the results (JSON)")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agents", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        uvloop.run(serve_engine(arguments.engine))
    elif arguments.agents:
        uvloop.run(serve_agents(*map(int, arguments.agents.split(","))))
    else:
        results = measure(
            arguments.rounds, arguments.seconds, arguments.only, arguments.prefill_ahead
        )
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
