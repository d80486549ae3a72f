"""``splitserve status --audit`` beside a router that answers what a test wants."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = bytes(range(32))
DIFFERENCE = {
    "node": "decode-0",
    "kind": "quarantined",
    "owner": "ab12-7",
    "blocks": 7,
    "since_s": 12.4,
    "explanation": "its writer has not fenced",
    "remedy": "nothing",
}


class Router(HTTPServer):
    """Answers every GET."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: dict[str, Any] = {"nodes": ["decode-0"], "differences": []}
        self.status = 200
        self.asked: list[tuple[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    """Notes who asks for what."""

    server: Router

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        body = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    """The router of a running cluster ``c``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("c")
    server = Router()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with files.lock():
        files.begin_run("{}", operator_token(SECRET))
        files.write_record(
            ClusterRecord(
                name="c",
                run="r",
                pid=1,
                source="c.yaml",
                url=f"http://127.0.0.1:{server.server_port}",
                nodes=("decode-0",),
                phase="serving",
                started=0.0,
                log_dir="",
            )
        )
        yield server
    server.shutdown()
    thread.join()
    server.server_close()


def audit(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, ("status", "--audit", *arguments))


def test_nothing_differs(router: Router) -> None:
    """Status 0 and one line; the router is asked as an operator."""
    for arguments in ((), ("c",)):
        result = audit(*arguments)
        assert (result.exit_code, result.stdout) == (0, "c: nothing differs (decode-0)\n")
    assert router.asked[0] == ("/internal/audit", f"Bearer {operator_token(SECRET)}")


def test_differences_are_a_table_and_a_status(router: Router) -> None:
    """Everything that the router says; as JSON too."""
    router.answer["differences"] = [DIFFERENCE]
    result = audit()
    assert result.exit_code == 4
    for text in ("decode-0", "quarantined", "ab12-7", "7", "12 s", "its writer", "nothing"):
        assert text in result.stdout
    result = audit("--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout) == router.answer


def test_a_router_that_refuses_or_is_gone(router: Router) -> None:
    """Status 1, and why."""
    router.status = 401
    result = audit()
    assert result.exit_code == 1
    assert "answers 401 to a question for its audit" in result.stderr
    record = ClusterFiles("c").record()
    assert record is not None
    router.shutdown()
    router.server_close()
    result = audit()
    assert result.exit_code == 1
    assert f"the router on {record.url} does not answer" in result.stderr


def test_every_router_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them knows nothing of another one may; one that is away does not matter while
    another answers, and what two see is shown once.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("test")
    servers = [Router(), Router()]
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        for server in servers
    ]
    for thread in threads:
        thread.start()
    other = DIFFERENCE | {"owner": "cd34-1"}
    servers[0].answer = {"nodes": ["decode-0"], "differences": [DIFFERENCE]}
    servers[1].answer = {"nodes": ["decode-0", "p"], "differences": [other, DIFFERENCE]}
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    record = ClusterRecord(
        name="test", run="r", pid=1, source="s", nodes=(), phase="serving", started=0.0,
        log_dir="", url="http://127.0.0.1:1", more_urls=tuple(urls),
    )  # fmt: skip
    try:
        with files.lock():
            files.write_record(record)
            files.token_path.write_text("token")
            result = CliRunner().invoke(main, ["status", "test", "--audit", "--json"])
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
    assert result.exit_code == 4, result.output
    assert json.loads(result.stdout) == {
        "nodes": ["decode-0", "p"],
        "differences": [DIFFERENCE, other],
    }
