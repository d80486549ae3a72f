"""Where `up` and `status` speak of the cache."""

from __future__ import annotations

import io
import json
import os
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from splitserve.kv_transfer.cache.settings import CacheSettings
from splitserve.kv_transfer.cache.socket_path import short_address
from splitserve.orchestrator.cli.display import LoadingDisplay, print_endpoints
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.base import ClusterStatus
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord, write_private
from splitserve.orchestrator.launch.paths import with_cache_paths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = """
engine: mock
model: {path: m}
name: c
cache: {tiers: [{type: cpu, capacity_bytes: 1 GB}, {type: redis, url: 'redis://h'}]}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFiles]:
    """Those of a running cluster."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("c")
    with files.lock():
        files.begin_run("{}", "token")
        files.write_record(
            ClusterRecord(
                name="c",
                run="r",
                pid=os.getpid(),
                source="s",
                url="http://127.0.0.1:1",
                nodes=(),
                phase="serving",
                started=0.0,
                log_dir="/logs",
            )
        )
        yield files


def shown() -> tuple[str, str]:
    """(the cache's state in JSON, the last line of the table)."""
    as_json = CliRunner().invoke(main, ["status", "c", "--json"]).stdout
    text = CliRunner().invoke(main, ["status", "c"]).stdout
    return json.loads(as_json)["clusters"][0]["cache"], text.splitlines()[-1]


def test_status_says_whether_the_cache_answers(files: ClusterFiles) -> None:
    """Nothing without a cache; what it means and where to look when it is down."""
    state, line = shown()
    assert state == ""
    assert not line.startswith("cache")
    path = files.cache_socket_path
    settings = CacheSettings(socket_path=str(path), chunk_tokens=256, tiers=())
    write_private(files.cache_settings_path, msgspec.json.encode(settings))
    assert shown() == (
        "does not answer",
        "cache: does not answer: the nodes compute everything; its log is /logs/cache.log",
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        with short_address(path) as address:
            server.bind(address)
        server.listen()
        assert shown() == ("ready", "cache: ready; `splitserve cache stat` says more")


def test_a_cluster_is_ready_with_its_cache() -> None:
    """Not before it; and without one when there is none."""
    assert ClusterStatus("ready", {}).is_ready
    assert ClusterStatus("ready", {}, "ready").is_ready
    assert not ClusterStatus("ready", {}, "starting").is_ready


def test_up_shows_the_cache(files: ClusterFiles) -> None:
    """While it starts, and where it is and how large in the end."""
    console = Console(file=io.StringIO(), width=200)
    with LoadingDisplay(console) as display:
        display.update(ClusterStatus("starting", {}, "starting"))
        display.update(ClusterStatus("starting", {}, "ready"))
    config = with_cache_paths(parse(TEXT))
    print_endpoints(console, config, ["http://r"], ClusterStatus("ready", {}, "ready"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "cache: starting",
        "router: starting",
        "cache: ready",
        "router  ready  http://r/v1  ",
        "dashboard  ready  http://r/dashboard  ",
        f"cache  ready  {files.cache_socket_path}  cpu 1.0 GB, redis",
    ]
