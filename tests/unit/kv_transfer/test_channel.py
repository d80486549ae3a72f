"""The secret, MACs and addresses of the control channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import zmq

from splitserve.kv_transfer.channel import dial, is_mac, listen, mac, parse_secret, tcp_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"0123456789abcdef"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """Sockets of the test are closed with it."""
    own: zmq.Context[Any] = zmq.Context()
    yield own
    own.destroy(0)


@pytest.mark.parametrize(
    ("text", "words"), [("xyz", "hexadecimal"), ("00" * 15, "15 bytes; at least 16"), ("", "0 b")]
)
def test_a_bad_secret_says_why(text: str, words: str) -> None:
    """The message does not contain the secret."""
    with pytest.raises(ValueError, match=words):
        parse_secret(text)


def test_a_secret_is_read() -> None:
    """White space around it is not part of it."""
    assert parse_secret(f" {SECRET.hex()}\n") == SECRET


def test_a_mac_binds_purpose_and_parts() -> None:
    """Neither another purpose nor another cut of the same bytes has the same MAC."""
    proof = mac(SECRET, "hello", b"ab", b"c")
    assert is_mac(proof, SECRET, "hello", b"ab", b"c")
    assert not is_mac(proof, SECRET, "hello", b"a", b"bc")
    assert not is_mac(proof, SECRET, "other", b"ab", b"c")
    assert not is_mac(proof, b"fedcba9876543210", "hello", b"ab", b"c")
    assert not is_mac(b"", SECRET, "hello", b"ab", b"c")


def test_addresses() -> None:
    """IPv6 addresses get brackets once."""
    assert tcp_address("127.0.0.1", 5) == "tcp://127.0.0.1:5"
    assert tcp_address("::1", 5) == "tcp://[::1]:5"
    assert tcp_address("[::1]", 5) == "tcp://[::1]:5"
    with pytest.raises(OSError, match="illegal"):
        tcp_address("a:b", 5)


def test_who_knows_the_secret_is_heard(
    context: zmq.Context[Any], free_port: Callable[[], int]
) -> None:
    """Both directions work; the listener's address cannot be taken twice."""
    address = tcp_address("127.0.0.1", free_port())
    router = listen(context, address, SECRET)
    dealer = dial(context, address, SECRET)
    dealer.send(b"question")
    assert router.poll(10_000)
    identity, payload = router.recv_multipart()
    assert payload == b"question"
    router.send_multipart([identity, b"answer"])
    assert dealer.poll(10_000)
    assert dealer.recv() == b"answer"
    with pytest.raises(OSError, match=f"cannot listen on {address}"):
        listen(context, address, SECRET)
    router.close()
    dealer.close()


def test_what_is_no_address_raises(context: zmq.Context[Any]) -> None:
    """At once, and without a socket left behind."""
    with pytest.raises(OSError, match="no address"):
        dial(context, "nonsense", SECRET)
    with pytest.raises(OSError, match="cannot listen"):
        listen(context, "tcp://127.0.0.1:notaport", SECRET)
