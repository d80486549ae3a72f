"""The cache's socket, wherever its folder is."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from splitserve.kv_transfer.cache.socket_path import connected, is_listening, short_address

if TYPE_CHECKING:
    from pathlib import Path


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    """Bound and found through a deep folder; packets keep their ends."""
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    path = folder / "cache.sock"
    assert not is_listening(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        with short_address(path) as address:
            server.bind(address)
        assert path.is_socket()
        server.listen()
        assert is_listening(path)
        with connected(path, 5.0) as client:
            server.accept()[0].close()  # That of the question before.
            accepted, _ = server.accept()
            with accepted:
                client.send(b"one")
                client.send(b"two")
                assert [accepted.recv(10), accepted.recv(10)] == [b"one", b"two"]
    assert not is_listening(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """An error of the system, as for any file."""
    with pytest.raises(FileNotFoundError), short_address(tmp_path / "no" / "cache.sock"):
        pass
    assert not is_listening(tmp_path / "no" / "cache.sock")
