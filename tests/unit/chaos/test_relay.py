"""The relay between a cluster's processes: it carries, it is cut, it heals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from chaos.relay import LISTEN_HOST, TARGET_HOST, Link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LIMIT_S = 10.0
SHORT_S = 0.1


@pytest.fixture
async def link(free_port: Callable[[], int]) -> AsyncIterator[Link]:
    """A link to a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    link = Link("x", free_port())
    target = await asyncio.start_server(echo, TARGET_HOST, link.port)
    server = await link.open()
    async with target, server, asyncio.timeout(LIMIT_S):
        yield link


async def test_bytes_and_ends_travel(link: Link) -> None:
    """What is sent comes back, and so does the end of it."""
    reader, writer = await asyncio.open_connection(LISTEN_HOST, link.port)
    writer.write(b"hello")
    writer.write_eof()
    assert await reader.read() == b"hello"
    writer.close()


async def test_a_frozen_link_delivers_late(link: Link) -> None:
    """Nothing passes and nobody is told; healed, everything arrives."""
    reader, writer = await asyncio.open_connection(LISTEN_HOST, link.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    link.cut("freeze")
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(3), SHORT_S)
    link.heal()
    assert await reader.readexactly(3) == b"two"
    writer.close()


async def test_a_reset_link_ends_connections(link: Link) -> None:
    """Those that are open and those that come; healed, new ones work."""
    reader, writer = await asyncio.open_connection(LISTEN_HOST, link.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    link.cut("reset")
    assert await _is_over(reader)
    again, other = await asyncio.open_connection(LISTEN_HOST, link.port)
    assert await _is_over(again)
    link.heal()
    last, third = await asyncio.open_connection(LISTEN_HOST, link.port)
    third.write(b"new")
    assert await last.readexactly(3) == b"new"
    for end in (writer, other, third):
        end.close()


async def _is_over(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True
