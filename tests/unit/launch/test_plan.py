"""What `up --dry-run` shows: everything but secrets."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import yaml

from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.launch.files import ClusterFiles, RunningClusterError
from splitserve.orchestrator.launch.plan import plan, shown_commands, shown_config, shown_env

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
engine: mock
model: {path: m}
router: {port: 0}
prefill:
  cpus: [[0]]
  kv_cache_bytes: 1 MiB
  env: {HF_TOKEN: hf_verysecret, PLAIN: seen}
  transfer: {transport: tcp}
decode: {kv_cache_bytes: 1 MiB, transfer: {transport: tcp}}
"""


def test_the_shown_configuration_can_be_read_again(tmp_path: Path) -> None:
    """The resolved YAML is a valid cluster YAML with every port filled in and no secret."""
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    prepared = plan(str(path), {})
    shown = shown_config(prepared.config)
    assert "hf_verysecret" not in shown
    again = parse(shown)
    assert again.prefill.port_base == prepared.config.prefill.port_base > 0
    assert yaml.safe_load(shown)["prefill"]["env"]["PLAIN"] == "seen"


@pytest.mark.parametrize("log_dir", ["~/logs", "logs", None])
def test_the_folder_of_the_logs_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_dir: str | None
) -> None:
    """All processes of a cluster find the same folder, wherever they run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT + (f"observability: {{log_dir: {log_dir}}}\n" if log_dir else ""))
    found = plan(str(path), {}).config.observability.log_dir
    expected = tmp_path / "logs" if log_dir else tmp_path / "state/splitserve/default/logs"
    assert found == str(expected)


def test_problems_of_this_machine_name_the_file(tmp_path: Path) -> None:
    """An address that this machine has not got is found before anything starts."""
    path = tmp_path / "cluster.yaml"
    text = TEXT.replace("transfer: {transport: tcp}}", "transfer: {transport: tcp, host: HOST}}")
    text = text.replace("HOST", "192.0.2.1")
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan(str(path), {})
    (problem,) = caught.value.problems
    assert problem.startswith("decode.transfer.host: this machine cannot listen on 192.0.2.1 (")
    assert caught.value.source == str(path)


def test_the_shown_commands_hold_no_secret(tmp_path: Path) -> None:
    """One line per node with its pinning, its variables and its arguments; two runs differ."""
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    prepared = plan(str(path), {})
    commands = shown_commands(prepared)
    assert list(commands) == ["prefill-0", "decode-0"]
    assert "taskset -c 0 " in commands["prefill-0"]
    assert "PLAIN=seen" in commands["prefill-0"]
    text = "\n".join(commands.values())
    assert "hf_verysecret" not in text
    assert prepared.secret.hex() not in text
    assert plan(str(path), {}).run != prepared.run


def test_names_that_tell_are_hidden() -> None:
    """Any variable that is named like a secret."""
    env = {"API_KEY": "a", "my_password": "b", "OMP_NUM_THREADS": "2"}
    assert shown_env(env) == {
        "API_KEY": "(hidden)",
        "my_password": "(hidden)",
        "OMP_NUM_THREADS": "2",
    }


def test_a_cluster_that_runs_is_no_stranger_on_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own router's port in use is told as what it is, alone; a stranger's as before."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path.write_text(TEXT.replace("port: 0", f"port: {taken.getsockname()[1]}"))
        with pytest.raises(ConfigError, match=r"router\.port: port \d+"):
            plan(str(path), {})
        with ClusterFiles("default").lock(), pytest.raises(RunningClusterError) as refused:
            plan(str(path), {})
    assert str(refused.value).startswith("a cluster named 'default' is running already; stop it")
