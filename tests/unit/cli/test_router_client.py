"""The command line's client of the router: one connection for many questions, and odd ids."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Router(ThreadingHTTPServer):
    """Answers every question with its path, on connections that are counted."""

    daemon_threads = True
    connections = 0
    closes_after = 0
    """Answers on a connection after which it is closed without a word; 0: never."""
    status = 200


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers = 0

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.server, Router)
        self.server.connections += 1

    def do_GET(self) -> None:
        assert isinstance(self.server, Router)
        body = json.dumps({"path": self.path}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.answers += 1
        self.close_connection = self.answers == self.server.closes_after

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    """It listens on a free port."""
    with Router(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(
    router: Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RouterClient]:
    """With one connection for all questions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("mock")
    files.run_dir.mkdir(parents=True)
    files.token_path.write_text("token")
    record = ClusterRecord(
        name="mock", run="r", pid=1, source="mock", nodes=(), phase="serving", started=0.0,
        log_dir="", url=f"http://127.0.0.1:{router.server_port}",
    )  # fmt: skip
    client = RouterClient(files, record, keep_alive=True)
    yield client
    client.close()


def test_one_connection_serves_many_questions(router: Router, client: RouterClient) -> None:
    """As ``top`` asks them."""
    assert [client.status()["path"] for _ in range(3)] == ["/internal/status"] * 3
    assert router.connections == 1


def test_a_connection_that_was_closed_meanwhile_is_replaced(
    router: Router, client: RouterClient
) -> None:
    """A router that has restarted, or that waited too long, costs no question."""
    router.closes_after = 1
    for _ in range(3):
        assert client.status()["path"] == "/internal/status"
    assert router.connections == 3


def test_a_router_that_is_away_is_said_to_be(router: Router, client: RouterClient) -> None:
    """And asked again at the next question."""
    assert client.status()
    router.status = 500
    with pytest.raises(RouterSilentError, match="answers 500"):
        client.status()
    router.status = 200
    assert client.status()


@pytest.mark.parametrize(
    ("request_id", "path"),
    [
        ("bench-1", "/internal/timeline/bench-1"),
        ("a/b#c%41", "/internal/timeline/a/b#c%41"),
        ("a b", None),
        ("a?b", None),
        ("ä", None),
        ("a\r\nb", None),
    ],
)
def test_ids_are_asked_for_as_they_are(
    client: RouterClient, request_id: str, path: str | None
) -> None:
    """The router does not decode them, and has none that cannot stand in a path."""
    found = client.timeline(request_id)
    assert (found and found["path"]) == path


def test_an_id_that_is_not_kept_is_none(router: Router, client: RouterClient) -> None:
    """Status 404; any other one is a failure."""
    router.status = 404
    assert client.timeline("bench-1") is None
    router.status = 401
    with pytest.raises(RouterSilentError, match="answers 401"):
        client.timeline("bench-1")


def test_a_router_that_is_there_answers_for_one_that_is_not(
    router: Router, client: RouterClient, free_port: Callable[[], int]
) -> None:
    """The first that takes the connection is asked; with none of them there the first is named."""
    away = f"http://127.0.0.1:{free_port()}"
    url = f"http://127.0.0.1:{router.server_port}"
    found = client._files.record()
    record = ClusterRecord(
        name="mock", run="r", pid=1, source="mock", nodes=(), phase="serving", started=0.0,
        log_dir="", url=away, more_urls=(url,),
    )  # fmt: skip
    assert found is None
    assert [one.url for one in record.routers] == [away, url]
    assert RouterClient(client._files, record).status()["path"] == "/internal/status"
    with pytest.raises(RouterSilentError, match=f"the router on {away} does not answer"):
        RouterClient(client._files, record.routers[0]).status()
