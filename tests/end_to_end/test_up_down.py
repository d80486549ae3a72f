"""`splitserve up`, `status` and `down` with real processes and the mock engine; what dies comes
back, and nothing is left behind.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.standing_still import stand_still
from support.up_process import UpProcess, kill, wait_for

CLUSTER = """
name: {name}
engine: mock
model: {{path: mock}}
router: {{port: 0}}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {{block_size: 32, max_model_len: 512}}
  transfer: {{transport: tcp}}
decode: *pool
supervision: {{restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}}
"""

NODES = ("prefill-0", "decode-0")
ENGINE = "engines.mock.server"
AGENT_OF_PREFILL = "orchestrator.agent --node prefill-0"
ROUTER = "orchestrator.router --config"
GUARD = "orchestrator.agent.guard"
SOON_S = 10.0
"""For what has ended already, where the machine is free."""

Start = Callable[..., UpProcess]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts clusters and kills what a failed test leaves of them."""
    started: list[UpProcess] = []

    def start(text: str = CLUSTER, name: str = "test", **env: str) -> UpProcess:
        folder = tmp_path_factory.mktemp(name)
        config = folder / "cluster.yaml"
        config.write_text(text.format(name=name))
        started.append(UpProcess(config, folder, env))
        return started[-1]

    yield start
    for up in started:
        up.close()


@pytest.fixture(scope="module")
def up(start: Start) -> Iterator[UpProcess]:
    """One cluster that serves, for the tests after which it serves again."""
    up = start()
    up.wait_until_serving()
    yield up
    up.interrupt()
    assert up.wait_for_end() == 0, up.output()
    up.wait_until_nothing_is_left(SOON_S)


def test_status_shows_every_node(up: UpProcess) -> None:
    """`status --json` names the address, the phase and each node's state."""
    status = up.status()
    assert status is not None
    assert status["phase"] == "serving"
    assert {node["node"]: node["phase"] for node in status["nodes"]} == {
        "prefill-0": "ready",
        "decode-0": "ready",
    }
    assert "prefill-0" in up.run("status").stdout


def test_everything_listens_on_loopback(up: UpProcess) -> None:
    """Every listening socket of the whole process tree is bound to a loopback address."""
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in up.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_no_secret_is_visible(up: UpProcess) -> None:
    """The cluster secret and the engines' keys stand neither on a command line nor in a log; the
    state files are private.
    """
    state = Path(up.env["XDG_STATE_HOME"]) / "splitserve"
    secret = (state / "test" / "cluster.secret").read_text()
    secrets = {secret}
    lines = []
    for process in up.processes():
        environ = process.environ()
        secrets |= {environ.get("VLLM_API_KEY", "")}
        lines += process.cmdline()
        assert secret not in environ.values()
    secrets.discard("")
    assert len(secrets) == 3
    files = [path for path in state.rglob("*") if path.is_file() and path.suffix != ".secret"]
    texts = ["\n".join(lines), *(path.read_text() for path in files)]
    assert not [secret for secret in secrets for text in texts if secret in text]
    assert (state / "test.json").stat().st_mode & 0o777 == 0o600
    assert (state / "test" / "resolved.json").stat().st_mode & 0o777 == 0o600
    assert (state / "test" / "operator.token").stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in state.rglob("*.secret"))


def test_a_second_up_of_the_same_name_is_refused(up: UpProcess) -> None:
    """A cluster that runs is not started twice; the message says how to go on, and the first one
    keeps serving.
    """
    second = up.run("up", str(up.output_path.with_name("cluster.yaml")))
    assert second.returncode == 2
    assert "splitserve down test" in second.stderr
    assert up.process.poll() is None


def test_a_killed_agent_comes_back(up: UpProcess) -> None:
    """SIGKILL of an agent ends its engine; `up` starts the agent again, and the new engine is
    another incarnation.
    """
    before = up.node("prefill-0")["incarnation"]
    kill(up.pids(AGENT_OF_PREFILL))
    _wait_for_new_life(up, "prefill-0", before)
    assert up.node("decode-0")["phase"] == "ready"


def test_a_killed_guard_takes_its_engine_along(up: UpProcess) -> None:
    """SIGKILL of a guard: the agent proves the engine gone and starts another; nothing of the old
    one is left.
    """
    before = up.node("prefill-0")["incarnation"]
    guards = up.pids(GUARD)
    assert len(guards) == 2
    old = {child.pid for guard in guards for child in psutil.Process(guard).children(True)}
    kill(guards)
    _wait_for_new_life(up, "prefill-0", before)
    wait_for(lambda: up.node("decode-0")["phase"] == "ready", 40, "the other node", up.story)
    assert not old & {process.pid for process in up.processes()}


def test_a_killed_engine_comes_back(up: UpProcess) -> None:
    """SIGKILL of an engine: its agent starts another one and counts the restart."""
    before = up.node("decode-0")["incarnation"]
    kill(up.pids(ENGINE))
    _wait_for_new_life(up, "decode-0", before)
    wait_for(lambda: up.node("prefill-0")["phase"] == "ready", 40, "the other node", up.story)
    assert up.node("decode-0")["restarts"] >= 1


def test_a_killed_router_comes_back(up: UpProcess) -> None:
    """SIGKILL of the router: `up` starts it again on the same port and the agents reconnect; the
    engines live on.
    """
    before = up.node("prefill-0")["incarnation"]
    (old,) = up.pids(ROUTER)
    kill([old])
    wait_for(lambda: up.pids(ROUTER) not in ([], [old]), 20, "a new router", up.story)
    # Only the new one can say so, and with the agents' connections to it
    wait_for(lambda: _usable_at_router(up) == set(NODES), 40, "the agents to reconnect", up.story)
    wait_for(lambda: _are_connected(up), 20, "the agents to say so", up.story)
    assert up.node("prefill-0")["incarnation"] == before


def test_agent_and_guard_killed_together(up: UpProcess) -> None:
    """When an agent and its guard die at the same moment, `up` sweeps what they left before it
    starts the agent again.
    """
    before = up.node("prefill-0")["incarnation"]
    (agent,) = up.pids(AGENT_OF_PREFILL)
    below = psutil.Process(agent).children(recursive=True)
    guards = [process.pid for process in below if process.pid in up.pids(GUARD)]
    stand_still(agent)
    kill([*guards, agent])
    _wait_for_new_life(up, "prefill-0", before)
    assert not {process.pid for process in below} & {process.pid for process in up.processes()}


def test_down_stops_everything(start: Start) -> None:
    """`down` stops the cluster: `up` ends with status 0, and `status` says that nothing runs."""
    up = start()
    up.wait_until_serving()
    down = up.run("down", "test")
    assert down.returncode == 0, down.stderr
    assert up.wait_for_end() == 0, up.output()
    up.wait_until_nothing_is_left(SOON_S)
    assert up.run("status").returncode == 3
    assert not list(Path(up.env["XDG_STATE_HOME"]).rglob("operator.token"))


def test_interrupt_while_loading(start: Start) -> None:
    """Ctrl-C before anything is ready ends `up` as well."""
    up = start()
    wait_for(lambda: up.pids(AGENT_OF_PREFILL), 20, "an agent", up.story)
    up.interrupt()
    up.wait_for_end()
    up.wait_until_nothing_is_left(SOON_S)


def test_nothing_is_left_after_up_was_killed(start: Start) -> None:
    """After SIGKILL of `up` the router, the agents, the guards and the engines end by
    themselves.
    """
    up = start()
    up.wait_until_serving()
    assert len(up.pids(ENGINE)) == 2
    kill([up.process.pid])
    up.wait_until_nothing_is_left()
    assert up.run("down", "test").returncode == 0


def test_a_port_in_use_is_refused_before_anything_starts(start: Start) -> None:
    """A router port that somebody listens on: status 2, naming the key, and no process was
    started.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = start(CLUSTER.replace("port: 0", f"port: {port}"))
        assert up.wait_for_end() == 2
    assert f"router.port: port {port}" in up.output()
    up.wait_until_nothing_is_left(SOON_S)


def test_a_failing_engine_is_explained(start: Start) -> None:
    """An engine that refuses its arguments: `up` ends with status 1 and shows its last lines and
    the likely cause.
    """
    bad = CLUSTER.replace("max_model_len: 512}}", "max_model_len: 512, no_such_flag: 1}}")
    up = start(bad)
    assert up.wait_for_end(60) == 1
    assert "--no-such-flag" in up.output()
    assert "correct `engine_args`" in up.output()
    up.wait_until_nothing_is_left(SOON_S)


def _are_connected(up: UpProcess) -> bool:
    return all(up.node(name)["router_connected"] for name in NODES)


def _usable_at_router(up: UpProcess) -> set[str]:
    """The nodes to which it gives work; none while it is away."""
    (record,) = (Path(up.env["XDG_STATE_HOME"]) / "splitserve").glob("*.json")
    url = json.loads(record.read_bytes())["url"]
    request = urllib.request.Request(f"{url}/internal/status", headers=up.operator())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            nodes = json.load(answer)["nodes"]
    except OSError:
        return set()
    return {name for name, node in nodes.items() if node["is_usable"]}


def _wait_for_new_life(up: UpProcess, node: str, before: str) -> None:
    def has_new_life() -> bool:
        now = up.node(node)
        return now.get("phase") == "ready" and now["incarnation"] not in ("", before)

    wait_for(has_new_life, 40, f"another life of {node}", up.story)
