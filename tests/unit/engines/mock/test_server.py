"""How the mock engine starts."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import TestClient, TestServer

from splitserve.orchestrator.engines.mock.server import arguments, build

ARGUMENTS = ["--model", "m", "--port", "1"]


def test_the_kv_size_gives_the_blocks() -> None:
    """Per rank, as in vLLM: half of the heads means twice the blocks."""
    size = ["--kv-cache-memory-bytes", str(2**21)]
    one = build(arguments().parse_args([*ARGUMENTS, *size]))
    two = build(arguments().parse_args([*ARGUMENTS, *size, "--tensor-parallel-size", "2"]))
    assert one.engine.scheduler.pool.total_blocks == 256
    assert two.engine.scheduler.pool.total_blocks == 512


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-cache-memory-bytes", "1000"], "max_model_len 4096 needs"),
        (["--tensor-parallel-size", "3"], "does not divide"),
        (["--kv-head-bytes", "12"], "multiple of 8"),
        (["--kv-transfer-config", "{}"], "missing required field"),
        (["--kv-transfer-config", "nonsense"], "--kv-transfer-config"),
    ],
)
def test_what_cannot_work_is_refused(flags: list[str], words: str) -> None:
    """With a sentence that names the flag."""
    with pytest.raises(ValueError, match=words):
        build(arguments().parse_args([*ARGUMENTS, *flags]))


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """In vLLM's words, which the agent knows."""
    with pytest.raises(SystemExit):
        arguments().parse_args([*ARGUMENTS, "--no-such-flag", "1"])
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err


async def test_it_tokenises_for_others() -> None:
    """As vLLM does: text and chats, without a key; errors are its errors."""
    parts = build(arguments().parse_args([*ARGUMENTS, "--kv-cache-memory-bytes", str(2**21)]))
    async with TestClient(TestServer(parts.api.application())) as client:
        told = await (await client.post("/tokenize", json={"model": "m", "prompt": "ab"})).json()
        assert told == {"count": 2, "max_model_len": 4096, "tokens": [97, 98]}
        messages = [{"role": "user", "content": "x"}]
        told = await (await client.post("/tokenize", json={"messages": messages})).json()
        assert bytes(told["tokens"]) == b"<user>x\n<assistant>"
        told = await (await client.post("/detokenize", json={"tokens": [97, 98]})).json()
        assert told == {"prompt": "ab"}
        assert (await client.post("/detokenize", json={"tokens": "ab"})).status == 400
        assert (await client.post("/tokenize", json={"prompt": 3})).status == 400
        assert (await client.post("/tokenize", json={"model": "n", "prompt": "a"})).status == 404
