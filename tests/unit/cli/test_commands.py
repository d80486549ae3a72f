"""The command line: what it prints and with which status it ends, without starting anything."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from splitserve.orchestrator.cli import up
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import builtin_names, dump_resolved, parse
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str) -> Result:
    """Run `splitserve` in this process."""
    return CliRunner().invoke(main, arguments)


def test_dry_run_shows_the_resolved_cluster(tmp_path: Path) -> None:
    """YAML that can be read again, then one command per engine; nothing is left in the state
    folder.
    """
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "engine: mock\nmodel: {path: m}\nrouter: {port: 0}\n"
        "prefill: &pool {kv_cache_bytes: 1 MiB, transfer: {transport: tcp}}\ndecode: *pool\n"
    )
    result = run("up", str(path), "--dry-run")
    assert result.exit_code == 0, result.output
    assert parse(result.stdout).router.port > 0
    assert result.stdout.count("engines.mock.server") == 2
    assert "# roles: nodes may change them with `splitserve flip" in result.stdout
    assert not (tmp_path / "state").exists()


def test_a_wrong_configuration_is_told(tmp_path: Path) -> None:
    """Status 2, the file, each problem on a line of its own, on standard error."""
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {path: m}\nengine: mokk\nrouter: {prt: 1}\n")
    result = run("up", str(path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{path} cannot be used; nothing was started" in result.stderr
    assert "  - router.prt (line 3): unknown key; did you mean 'port'?" in result.stderr
    assert "  - engine (line 2): " in result.stderr


@pytest.mark.parametrize("command", [("doctor",), ("render", "kubernetes"), ("config", "show")])
def test_only_what_starts_something_says_that_it_did_not(command: tuple[str, ...]) -> None:
    """The others name the cluster and what is wrong."""
    result = run(*command, "nosuch")
    assert result.exit_code == 2
    assert "nosuch cannot be used:\n" in result.stderr
    assert "nosuch cannot be used; nothing was started:\n" in run("up", "nosuch").stderr


def test_status_without_clusters() -> None:
    """Status 3, and an empty list in JSON."""
    assert run("status").exit_code == 3
    result = run("status", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {"clusters": []}
    assert run("down").exit_code == 3
    assert run("status", "--audit").exit_code == 3
    assert run("status", "--audit", "nothing").exit_code == 3


def test_config_list_and_show() -> None:
    """Every built-in configuration is listed, and shown as its file."""
    listed = run("config", "list").stdout
    for name in builtin_names():
        assert name in listed
        assert run("config", "show", name).exit_code == 0
    assert run("config", "show", "nothing").exit_code == 2


def test_version() -> None:
    """The package and what it runs on."""
    assert run("version").stdout.startswith("splitserve ")


def test_doctor(tmp_path: Path) -> None:
    """Status 2 when something must be changed, with what; every check is listed."""
    path = tmp_path / "cluster.yaml"
    path.write_text("engine: mock\nmodel: {path: m}\nprefill: {cpus: [[4000]]}\n")
    result = run("doctor", str(path))
    assert result.exit_code == 2
    assert "FAIL  cpus" in result.stdout
    assert "no CPU 4000" in result.stdout
    assert "roles: fixed: prefill.cpus gives each node 1 CPUs but decode.cpus" in result.stdout
    assert "ok    model" in result.stdout


@pytest.mark.parametrize(
    ("loads", "told"),
    [
        ([(2, 1)], "waits for 3 requests to finish, at most 30 s\n"),
        ([(1, 0), (0, 0)], "waits for 1 request to finish, at most 30 s\n"),
        ([(0, 0), None], ""),
    ],
)
def test_down_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, loads: list[tuple[int, int] | None], told: str
) -> None:
    """Requests of all routers that answer, and for how long; nothing where there are none."""
    answers = {
        f"http://127.0.0.1:{port}": {"requests": {"running": load[0], "waiting": load[1]}}
        if load
        else {}
        for port, load in enumerate(loads)
    }
    text = "engine: mock\nmodel: {path: m}\nsupervision: {drain_timeout_s: 30}\n"
    files = ClusterFiles("test")
    with files.lock() as lock:
        files.begin_run(dump_resolved(parse(text)), "token")
        files.write_record(
            ClusterRecord(
                name="test", run="r", pid=7, source="", url="", nodes=(), phase="serving",
                started=0.0, log_dir="",
            )
        )  # fmt: skip
        monkeypatch.setattr(up, "_router_statuses", lambda files, record: answers)
        monkeypatch.setattr(up, "sweep", lambda run: None)
        monkeypatch.setattr(up, "os", SimpleNamespace(kill=lambda pid, number: lock.close()))
        result = run("down")
    assert (result.exit_code, result.stdout) == (0, f"{told}test has been stopped\n")


@pytest.mark.parametrize(
    ("serves", "status", "told"),
    [
        (True, 0, "test serves; `splitserve down test` stops it\n"),
        (False, 130, "test has been stopped\n"),
    ],
)
def test_detached_on_ray_it_serves_on_or_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool, status: int, told: str
) -> None:
    """Ctrl-C before it served has stopped it, and nothing says that it serves."""

    async def ran(*_: object, leaves: bool) -> bool:
        assert leaves
        return serves

    config = SimpleNamespace(name="test", launcher="ray", cache=None)
    prepared = SimpleNamespace(config=config, source="cluster.yaml")
    monkeypatch.setattr(up, "plan", lambda source, environ: prepared)
    monkeypatch.setattr(up, "run_cluster", ran)
    result = run("up", str(tmp_path / "cluster.yaml"), "--detach")
    assert (result.exit_code, result.stdout) == (status, told)
