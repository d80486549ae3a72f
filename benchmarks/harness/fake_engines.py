"""Engines that answer at once, and agents that report them: what stands behind a router under test.

A program of its own, one process per role:

    python fake_engines.py engine PORT
    python fake_engines.py agents ROUTER_PORT PREFILL_PORT DECODE_PORT [PREFILL_PORT]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import uvloop

MODEL = "fake"
SECRET = "5a" * 32
HELD_MARKS = 10_000
EVENTS = [
    b'data: {"id":"cmpl-x","object":"text_completion","created":1,"model":"fake","choices":'
    b'[{"index":0,"text":" token%02d","logprobs":null,"finish_reason":null}]}\n\n' % number
    for number in range(32)
]
DONE = b"data: [DONE]\n\n"
PLAIN = json.dumps(
    {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "text": " token" * 32, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 32, "total_tokens": 40},
        "kv_transfer_params": {
            "remote_engine_id": "e",
            "remote_block_ids": [1],
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        },
    }
).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAMED = STREAM_HEAD + b"".join(map(_chunk, [*EVENTS, DONE])) + b"0\r\n\r\n"
UNSTREAMED = _plain(b"200 OK", PLAIN)
MODELS = _plain(b"200 OK", json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())
NOT_FOUND = _plain(b"404 Not Found", b"{}")


class FakeEngine(asyncio.Protocol):
    """Answers at once: a stream in one write, or a small JSON body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._held = b""

    def data_received(self, data: bytes) -> None:
        held = self._held + data
        while True:
            end = held.find(b"\r\n\r\n")
            if end < 0:
                break
            head = held[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(held) < end + 4 + size:
                break
            body, held = held[end + 4 : end + 4 + size], held[end + 4 + size :]
            self._answer(head, body)
        self._held = held

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post"):
            self._transport.write(STREAMED if b'"stream":true' in body else UNSTREAMED)
        elif head.startswith(b"get /metrics"):
            self._transport.write(NOT_FOUND)
        else:
            self._transport.write(MODELS)


async def serve_engine(port: int) -> None:
    """Until killed."""
    server = await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", port)
    await server.serve_forever()


async def serve_agents(
    router_port: int, prefill_port: int, decode_port: int, second_prefill_port: int = 0
) -> None:
    """Speak to our router for both engines, twice a second, until killed. Their prefix caches hold
    many beginnings, none of them of a prompt that is asked for.
    """
    import aiohttp
    import msgspec

    from splitserve.orchestrator.agent.auth import agent_token
    from splitserve.orchestrator.agent.messages import (
        AgentHello,
        NodeDescription,
        NodePrefixes,
        NodeState,
    )

    headers = {"Authorization": f"Bearer {agent_token(bytes.fromhex(SECRET))}"}
    url = f"http://127.0.0.1:{router_port}/internal/agents"
    blocks = 1_000_000

    async def speak(session: aiohttp.ClientSession, name: str, port: int) -> None:
        role = name.partition("-")[0]
        node = NodeDescription(
            node=name,
            pool=role,
            incarnation=name,
            engine_url=f"http://127.0.0.1:{port}",
            engine_api_key="engine-key",
            control_addresses=(f"tcp://127.0.0.1:{port + 1}",),
            model=MODEL,
            max_model_len=8192,
            block_tokens=16,
            total_blocks=blocks,
            tensor_parallel=1,
            transport="tcp",
            fingerprint={"weights": "w"},
            reports_prefixes=True,
        )
        state = NodeState(
            node=name, incarnation=name, phase="ready", free_blocks=blocks, total_blocks=blocks
        )
        async with session.ws_connect(url, headers=headers) as ws:
            await ws.send_str(msgspec.json.encode(AgentHello(description=node, role=role)).decode())
            held = NodePrefixes(
                node=name,
                incarnation=name,
                is_first=True,
                added=random.Random(name).randbytes(8 * HELD_MARKS),
                tokens=(128,) * HELD_MARKS,
            )
            await ws.send_str(msgspec.json.encode(held).decode())
            while not ws.closed:
                await ws.send_str(msgspec.json.encode(state).decode())
                await asyncio.sleep(0.5)

    async with aiohttp.ClientSession() as session:
        ports = {"prefill": prefill_port, "decode": decode_port}
        if second_prefill_port:
            ports["prefill-2"] = second_prefill_port
        await asyncio.gather(*(speak(session, name, port) for name, port in ports.items()))


if __name__ == "__main__":
    role, *ports = sys.argv[1:]
    uvloop.run({"engine": serve_engine, "agents": serve_agents}[role](*map(int, ports)))
