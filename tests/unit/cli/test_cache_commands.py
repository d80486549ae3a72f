"""`splitserve cache ...` against a router with a fake cache server: what is asked, printed, and the
exit status.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from router_stubs.cache_server import CHUNK_TOKENS, CacheServerStub, cache_server_stub
from router_stubs.cluster import SECRET, stub_cluster
from router_stubs.engine import send

from splitserve.kv_transfer.cache.control_messages import ClearWish, TenantStat
from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.cli import router_client
from splitserve.orchestrator.cli.cache_tables import size
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import tenant_tag
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from router_stubs.engine import Asked

TOKENS = list(range(3 * CHUNK_TOKENS))
LONGEST = 1024
"""``max_model_len`` of the engine."""
START_LIMIT_S = 20


class Cluster:
    """A router in a thread of its own, with one engine that tokenises everything into ``TOKENS``
    and a cache server that holds two chunks of everything.
    """

    def __init__(self, server: CacheServerStub, keys: dict[str, str]) -> None:
        self.server = server
        self.asked: list[Asked] = []
        """By the router, of the engine."""
        self.url = ""
        self._keys = keys
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Cluster:
        self._thread.start()
        assert self._is_up.wait(START_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_LIMIT_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with stub_cluster("p0", keys=self._keys, cache=self.server.section) as cluster:
            self.url = cluster.url
            cluster.engines["p0"].answer = self._tokenise
            self._is_up.set()
            await self._end.wait()

    async def _tokenise(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.asked.append(asked)
        await send(writer, 200, json.dumps({"tokens": TOKENS}).encode())


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> dict[str, str]:
    """The cluster's API keys: none, unless the test says so."""
    return getattr(request, "param", {})


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> Iterator[Cluster]:
    """A running cluster called ``test``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("test")
    lock = files.lock()
    files.begin_run("{}", operator_token(SECRET))
    with cache_server_stub(files.cache_socket_path) as server, Cluster(server, keys) as cluster:
        server.held = 2
        files.write_record(record(cluster.url))
        yield cluster
    lock.close()


def record(url: str) -> ClusterRecord:
    """What `up` has written; this process is the `up`."""
    return ClusterRecord(
        name="test",
        run="r",
        pid=os.getpid(),
        source="s",
        url=url,
        nodes=(),
        phase="serving",
        started=0.0,
        log_dir="",
    )


def run(*arguments: str, stdin: str | None = None) -> Result:
    """Run `splitserve cache`."""
    return CliRunner().invoke(main, ["cache", *arguments], input=stdin)


def written(folder: Path, value: object, name: str = "value.json") -> str:
    """A file with ``value`` as JSON."""
    path = folder / name
    path.write_text(json.dumps(value))
    return str(path)


def test_the_state_is_a_table(cluster: Cluster) -> None:
    """Memory, tiers with their speed and trouble, tenants, engines."""
    cluster.server.tenants = (
        TenantStat(tenant="", used_bytes={"cpu": 5000}, quota_bytes={"cpu": 10**6}),
    )
    result = run("stat")
    assert result.exit_code == 0, result.output
    assert "cache server life-1, up for 61 s" in result.stdout
    assert "1.0 MB in 1000 slots of 1.0 kB: 5 used, 1 in use by engines" in result.stdout
    assert "engines: 1 connected" in result.stdout
    (cpu,) = [line for line in result.stdout.splitlines() if "2.00 GB/s" in line]
    assert all(part in cpu for part in ("cpu", "ok", "5.0 kB", "75% of 4", "1.5 ms"))
    assert "breaker open" in result.stdout
    assert "disk: disk is gone" in result.stdout
    (tenant,) = [line for line in result.stdout.splitlines() if "(all)" in line]
    assert "1.0 MB" in tenant


def test_the_state_as_json(cluster: Cluster) -> None:
    """Everything that the router says; the cluster by name."""
    result = run("stat", "--json", "--cluster", "test")
    assert json.loads(result.stdout)["tiers"][0]["name"] == "cpu"


def test_a_look_up(cluster: Cluster, tmp_path: Path) -> None:
    """Which tier holds how much; with --json as the router says it."""
    result = run("lookup", "--tokens", written(tmp_path, TOKENS))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "256 of 384 tokens are cached",
        "  cpu: 128",
        "  disk: 256",
        "  pinned: 128",
    ]
    as_json = run("lookup", "--prompt", "x", "--json")
    assert json.loads(as_json.stdout)["tiers"] == {"cpu": 128, "disk": 256}


def test_a_prompt_can_be_named_in_many_ways(cluster: Cluster, tmp_path: Path) -> None:
    """Text, a file, stdin, messages, a whole chat request: all the same chunks here; the engine
    is asked for what each of them says.
    """
    messages = [{"role": "user", "content": "hi"}]
    text = tmp_path / "text"
    text.write_text("text")
    tools = [{"type": "function"}]
    chat = {"model": "m", "messages": messages, "max_tokens": 3, "tools": tools}
    for arguments in (
        ["--prompt", "text"],
        ["--prompt-file", str(text)],
        ["--messages", written(tmp_path, messages)],
        ["--messages", written(tmp_path, chat, "chat.json")],
    ):
        assert run("lookup", *arguments).exit_code == 0
    assert run("lookup", "--prompt-file", "-", stdin="text").exit_code == 0
    of_text = {"model": "m", "prompt": "text"}
    of_chat = {"model": "m", "messages": messages, "add_generation_prompt": True}
    bodies = [asked.body for asked in cluster.asked]
    assert bodies == [of_text, of_text, of_chat, of_chat | {"tools": tools}, of_text]
    assert len({wish.keys for _, wish in cluster.server.asked}) == 1


@pytest.mark.parametrize(
    ("arguments", "verb", "tier", "said"),
    [
        (["pin"], "pin", "", "pinned"),
        (["unpin", "--tier", "disk"], "unpin", "disk", "unpinned"),
        (["prefetch"], "prefetch", "", "there"),
        (["move", "--tier", "disk"], "move", "disk", "moved"),
    ],
)
def test_chunks_are_changed(
    cluster: Cluster, tmp_path: Path, arguments: list[str], verb: str, tier: str, said: str
) -> None:
    """What was done, and status 1 while something is missing."""
    prompt = ["--tokens", written(tmp_path, TOKENS), "--timeout", "7"]
    some = run(*arguments, *prompt)
    assert some.exit_code == 1
    assert some.stdout == f"{said}: 2 chunks (256 tokens, 2.0 kB); 1 chunks are not\n"
    cluster.server.held = 3
    everything = run(*arguments, *prompt, "--json")
    assert everything.exit_code == 0, everything.output
    assert json.loads(everything.stdout)["tokens"] == 384
    asked, wish = cluster.server.asked[0]
    assert (asked, wish.tier, wish.limit_s, len(wish.keys)) == (verb, tier, 7.0, 3 * KEY_BYTES)


@pytest.mark.parametrize("keys", [{"sk-1": "a"}], indirect=True)
def test_chunks_are_cleared(cluster: Cluster) -> None:
    """A tenant's, a tier's or everything, and nothing by accident."""
    assert run("clear", "--tenant", "a", "--pinned").stdout == (
        "removed: 2 chunks (256 tokens, 2.0 kB)\n"
    )
    assert run("clear", "--tier", "cpu").exit_code == 0
    assert run("clear", "--all").exit_code == 0
    assert run("clear").exit_code == 2
    assert run("clear", "--all", "--tier", "cpu").exit_code == 2
    tag = tenant_tag(SECRET, "a")
    assert [wish for _, wish in cluster.server.asked] == [
        ClearWish(tenant=tag, keep_pinned=False, limit_s=30.0),
        ClearWish(tenant=None, tier="cpu", limit_s=30.0),
        ClearWish(tenant=None, limit_s=30.0),
    ]


@pytest.mark.parametrize("keys", [{"sk-1": "a"}], indirect=True)
def test_quotas(cluster: Cluster) -> None:
    """Shown, set with a unit, taken away."""
    assert "there are no quotas" in run("quota").stdout
    shown = run("quota", "a", "cpu", "1.5 GB")
    assert shown.exit_code == 0, shown.output
    (row,) = [line for line in shown.stdout.splitlines() if " a " in line]
    assert "1.5 GB" in row
    gone = run("quota", "a", "cpu", "none", "--json")
    assert json.loads(gone.stdout)["tenants"] == [
        {"tenant": "a", "used_bytes": {}, "quota_bytes": {}}
    ]
    many = run("quota", "a", "cpu", "many")
    assert many.exit_code == 2
    assert "LIMIT: 'many' is no size" in many.stderr
    negative = run("quota", "a", "cpu", "-2 GB")
    assert negative.exit_code == 2
    assert "LIMIT: '-2 GB' is no size" in negative.stderr


@pytest.mark.parametrize("entry", [{"a": 1}, "7", 1.5, True, -1, 2**32])
def test_a_list_of_something_else_is_refused(
    cluster: Cluster, tmp_path: Path, entry: object
) -> None:
    """With the entry's place and what was expected."""
    result = run("lookup", "--tokens", written(tmp_path, [5, entry]))
    assert result.exit_code == 2
    assert "--tokens: entry 1 of the list is no token id" in result.stderr
    assert not cluster.server.asked


def test_a_prompt_that_no_engine_serves_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Whatever is cached of it; a prompt and a token of the answer have to fit."""
    for tokens, is_told in ((LONGEST - 1, False), (LONGEST, True)):
        result = run("lookup", "--tokens", written(tmp_path, list(range(tokens))))
        assert result.exit_code == 0, result.output
        assert ("no engine serves this prompt" in result.stdout) is is_told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lookup"], "name the prompt once"),
        (["lookup", "--prompt", "x", "--tokens", "FILE"], "name the prompt once"),
        (["lookup", "--tokens", "FILE"], "--tokens: the file must hold a JSON list of token ids"),
        (["lookup", "--messages", "FILE"], "--messages: the file must hold a JSON list"),
        (["lookup", "--prompt", "x", "--tenant", "a"], "there are no security.api_keys"),
        (["pin", "--prompt", "x", "--tier", "tape"], "no tier 'tape'; known: cpu, disk"),
        (["move", "--prompt", "x"], "Missing option '--tier'"),
        (["quota", "*", "tape", "1 GB"], "no tier 'tape'"),
    ],
)
def test_what_is_refused(
    cluster: Cluster, tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Exit status 2 and what to do."""
    file = written(tmp_path, {"neither": "list"})
    result = run(*(file if argument == "FILE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert words in result.stderr
    assert not cluster.server.asked


def test_a_file_that_is_no_json(cluster: Cluster, tmp_path: Path) -> None:
    """Named."""
    path = tmp_path / "broken.json"
    path.write_text("{")
    result = run("lookup", "--tokens", str(path))
    assert result.exit_code == 2
    assert f"{path} is no JSON" in result.stderr


def test_a_cache_that_does_not_answer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1 with what happened, whether it is the cache server or the router; 3 when the
    cluster does not run.
    """
    cluster.server.raw_answer = lambda message: b""
    silent = run("stat")
    assert silent.exit_code == 1
    assert "the router answers 503: the cache server has closed" in silent.stderr
    monkeypatch.setattr(router_client, "_TIMEOUT_S", 0.5)
    files = ClusterFiles("test")
    files.write_record(record("http://127.0.0.1:1"))
    away = run("stat")
    assert away.exit_code == 1
    assert "does not answer" in away.stderr
    assert run("stat", "--cluster", "other").exit_code == 3


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes(count: int | None, shown: str) -> None:
    """In decimal units."""
    assert size(count) == shown


def test_every_command_explains_itself() -> None:
    """With a line of help for each option."""
    for name, command in main.commands["cache"].commands.items():  # type: ignore[attr-defined]
        result = run(name, "--help")
        assert result.exit_code == 0
        options: list[Any] = [p for p in command.params if p.param_type_name == "option"]
        assert all(option.help for option in options), name
