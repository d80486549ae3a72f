"""Headers and checksums of stored chunks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.chunks import MODEL, ODD, PAGES, make_chunk
from xxhash import xxh3_64_intdigest

from splitserve.kv_transfer.cache.chunk_format import (
    BadChunkError,
    Header,
    Seal,
    body_checksums,
    decode_header,
    encode_header,
    verify_body,
)
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES


@st.composite
def geometries(draw: st.DrawFn) -> ChunkGeometry:
    """Small enough to fill."""
    number = st.integers(1, 4)
    block_tokens = draw(number)
    return ChunkGeometry(
        layers=draw(number),
        chunk_tokens=block_tokens * draw(number),
        block_tokens=block_tokens,
        heads=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        key_bytes=draw(number),
        value_bytes=draw(st.integers(0, 4)),
        item_bytes=draw(number),
        order=draw(st.sampled_from(["rows", "vec", ""])),
    )


@st.composite
def headers(draw: st.DrawFn) -> Header:
    """Any that can be."""
    geometry = draw(geometries())
    pieces = draw(st.sampled_from([p for p in range(1, 9) if geometry.heads % p == 0]))
    size = geometry.layers * pieces * 8
    return Header(
        key=draw(st.binary(min_size=32, max_size=32)),
        model=draw(st.binary(min_size=32, max_size=32)),
        geometry=geometry,
        pieces=pieces,
        checksums=draw(st.binary(min_size=size, max_size=size)),
        parent=draw(st.sampled_from([b"", bytes(32)])),
        tenant=draw(st.text("ab\0é", max_size=40)),
        seal=draw(st.none() | st.builds(Seal, st.binary(), st.binary(), st.binary())),
    )


@given(headers())
def test_a_header_comes_back(header: Header) -> None:
    """From exactly 16 KiB, for its key, for its model or any."""
    data = memoryview(encode_header(header))
    assert len(data) == HEADER_BYTES
    assert decode_header(data, header.key, header.model) == header
    assert decode_header(data, header.key, None) == header


@given(headers(), st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_found(header: Header, bit: int) -> None:
    """Also in its padding."""
    data = bytearray(encode_header(header))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadChunkError):
        decode_header(memoryview(data), header.key, header.model)


@given(st.binary(max_size=200), st.integers(0, HEADER_BYTES))
@example(b"", HEADER_BYTES)
@example(b"SPLITKV\n\x03\0\0\0\xff\xff\xff\xff", HEADER_BYTES)
def test_noise_is_no_header(noise: bytes, size: int) -> None:
    """Of whatever length, and with a right checksum too."""
    data = (noise + bytes(HEADER_BYTES))[:size]
    checked = data[: HEADER_BYTES - 8]
    checked += xxh3_64_intdigest(checked).to_bytes(8, "little")
    for tried in (data, checked):
        with pytest.raises(BadChunkError):
            decode_header(memoryview(tried), bytes(32), None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pieces": 0}, "pieces"),
        ({"pieces": 3}, "pieces"),
        ({"checksums": bytes(8)}, "checksum"),
        ({"key": bytes(31)}, "32 bytes"),
        ({"codec": "zstd"}, "codec"),
        ({"codec": "int8"}, "frame for each layer"),
        ({"frames": bytes(12)}, "not coded"),
        ({"codec": "int8", "frames": b"\xff" * 12}, "no larger"),
        ({"surprise": 1}, "surprise"),
        ({"geometry": {"layers": -1}}, "geometry"),
    ],
)
def test_a_header_that_contradicts_itself_is_bad(changes: dict[str, object], said: str) -> None:
    """Checksums can be right where the content is not: written by another program."""
    header = make_chunk(1).header
    content = msgspec.msgpack.encode(msgspec.to_builtins(header, builtin_types=(bytes,)) | changes)
    data = b"SPLITKV\n\x03\0\0\0" + len(content).to_bytes(4, "little") + content
    data += bytes(HEADER_BYTES - 8 - len(data))
    data += xxh3_64_intdigest(data).to_bytes(8, "little")
    with pytest.raises(BadChunkError, match=said):
        decode_header(memoryview(data), header.key, header.model)


def test_another_key_model_or_version_is_refused() -> None:
    """Each says what it is."""
    header = make_chunk(1).header
    data = bytearray(encode_header(header))
    with pytest.raises(BadChunkError, match="another chunk"):
        decode_header(memoryview(data), bytes(32), header.model)
    with pytest.raises(BadChunkError, match="another model"):
        decode_header(memoryview(data), header.key, bytes(32))
    data[8] = 4
    with pytest.raises(BadChunkError, match="format 4; this is format 3"):
        decode_header(memoryview(data), header.key, header.model)


def test_a_model_with_too_many_layers_is_refused_in_time() -> None:
    """When it is encoded, with the numbers."""
    geometry = msgspec.structs.replace(PAGES, layers=1000, heads=8)
    header = Header(
        key=bytes(32), model=MODEL, geometry=geometry, pieces=8, checksums=bytes(8 * 8 * 1000)
    )
    with pytest.raises(ValueError, match="1000 layers in 8 pieces"):
        encode_header(header)


@given(geometries())
def test_checksums_are_those_of_each_ranks_heads(geometry: ChunkGeometry) -> None:
    """A piece is the same heads of every block, hashed in the order of blocks."""
    data = bytes(i * 7 % 251 for i in range(geometry.chunk_bytes))
    for pieces in (p for p in range(1, geometry.heads + 1) if geometry.heads % p == 0):
        expected = b""
        for layer in range(geometry.layers):
            for piece in range(pieces):
                stream = b""
                for block in range(geometry.blocks):
                    for head in range(geometry.heads):
                        if head * pieces // geometry.heads == piece:
                            place = (layer * geometry.blocks + block) * geometry.heads + head
                            at = place * geometry.slice_bytes
                            stream += data[at : at + geometry.slice_bytes]
                expected += xxh3_64_intdigest(stream).to_bytes(8, "little")
        assert body_checksums(memoryview(data), geometry, pieces) == expected


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_broken_layer_is_named(pieces: int) -> None:
    """One flipped bit anywhere in it; a body of another size is torn."""
    chunk = make_chunk(2, ODD, pieces=pieces)
    verify_body(chunk.header, chunk.buffers.body)
    for layer in range(ODD.layers):
        for at in (0, ODD.layer_bytes - 1):
            place = layer * ODD.layer_bytes + at
            chunk.buffers.body[place] ^= 1
            with pytest.raises(BadChunkError, match=f"layer {layer} does not fit"):
                verify_body(chunk.header, chunk.buffers.body)
            chunk.buffers.body[place] ^= 1
    with pytest.raises(BadChunkError, match="torn"):
        verify_body(chunk.header, chunk.buffers.body[:-1])
