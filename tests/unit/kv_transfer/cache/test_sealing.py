"""Chunks that only their tenant's key opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from support.chunks import MODEL, make_chunk, new_body

from splitserve.kv_transfer.cache.chunk_format import (
    BadChunkError,
    Header,
    decode_header,
    encode_header,
    verify_body,
)
from splitserve.kv_transfer.cache.sealing import Sealer

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = bytes(range(32))


@pytest.fixture
def plain() -> tuple[Header, bytes]:
    chunk = make_chunk(1, pieces=2)
    return msgspec.structs.replace(chunk.header, tenant="a"), bytes(chunk.buffers.body)


@pytest.fixture
def sealed(plain: tuple[Header, bytes]) -> tuple[Header, memoryview]:
    header, body = plain
    into = new_body(len(body))
    return Sealer(SECRET).seal(header, memoryview(body), into), into


def test_a_sealed_chunk_opens(
    plain: tuple[Header, bytes], sealed: tuple[Header, memoryview]
) -> None:
    """In its place, by any process with the secret, after its header was stored."""
    header, body = sealed
    stored = decode_header(memoryview(encode_header(header)), header.key, MODEL)
    opened = Sealer(SECRET).unseal(stored, body)
    assert opened == plain[0]
    assert body == plain[1]
    verify_body(opened, body)


def test_nothing_of_the_content_is_left_in_sight(
    plain: tuple[Header, bytes], sealed: tuple[Header, memoryview]
) -> None:
    """Not the body, not its checksums; and the same chunk looks different each time."""
    header, body = sealed
    assert header.checksums != plain[0].checksums
    runs = {plain[1][at : at + 16] for at in range(0, len(plain[1]), 16)}
    assert not any(bytes(body[at : at + 16]) in runs for at in range(0, len(body), 16))
    again = new_body(len(body))
    other = Sealer(SECRET).seal(plain[0], memoryview(plain[1]), again)
    assert again != body
    assert other.checksums != header.checksums


def test_a_flipped_bit_is_found(sealed: tuple[Header, memoryview]) -> None:
    """Anywhere in the body."""
    header, body = sealed
    kept = bytes(body)
    for place in (0, len(body) // 2, len(body) - 1):
        body[:] = kept
        body[place] ^= 0x80
        with pytest.raises(BadChunkError, match="seal"):
            Sealer(SECRET).unseal(header, body)


def test_every_field_of_the_header_is_sealed_too(sealed: tuple[Header, memoryview]) -> None:
    """None can be changed or taken from another chunk."""
    header, body = sealed
    assert header.seal is not None
    geometry = msgspec.structs.replace(header.geometry, order="vec")
    changes: list[dict[str, object]] = [
        {"key": bytes(32)},
        {"model": bytes(32)},
        {"parent": bytes(32)},
        {"geometry": geometry},
        {"pieces": 4, "checksums": header.checksums * 2},
        {"checksums": bytes(len(header.checksums))},
        {"seal": msgspec.structs.replace(header.seal, nonce=bytes(12))},
        {"seal": msgspec.structs.replace(header.seal, nonce=b"")},
        {"seal": msgspec.structs.replace(header.seal, tag=bytes(16))},
        {"seal": msgspec.structs.replace(header.seal, tag=header.seal.tag[:4])},
    ]
    kept = bytes(body)
    for change in changes:
        body[:] = kept
        with pytest.raises(BadChunkError, match="seal"):
            Sealer(SECRET).unseal(msgspec.structs.replace(header, **change), body)
    body[:] = kept
    Sealer(SECRET).unseal(header, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: (Sealer(bytes(32)), header),
        lambda header: (Sealer(SECRET), msgspec.structs.replace(header, tenant="b")),
    ],
    ids=["another secret", "another tenant"],
)
def test_another_key_does_not_open_it(
    sealed: tuple[Header, memoryview], change: Callable[[Header], tuple[Sealer, Header]]
) -> None:
    """It is named as such, and the body stays as it was."""
    sealer, header = change(sealed[0])
    before = bytes(sealed[1])
    with pytest.raises(BadChunkError, match="another secret"):
        sealer.unseal(header, sealed[1])
    assert sealed[1] == before


def test_a_chunk_without_a_seal_is_refused(plain: tuple[Header, bytes]) -> None:
    """Anybody could have written it."""
    with pytest.raises(BadChunkError, match="not sealed"):
        Sealer(SECRET).unseal(plain[0], new_body(len(plain[1])))


def test_checksums_of_a_sealed_chunk_are_not_asked_for(
    sealed: tuple[Header, memoryview],
) -> None:
    """A caller's mistake, and no bad chunk."""
    with pytest.raises(ValueError, match="encrypted"):
        verify_body(*sealed)


def test_a_short_secret_is_refused() -> None:
    """It could be guessed."""
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Sealer(b"short")
