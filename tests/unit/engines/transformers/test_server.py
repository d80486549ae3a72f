"""The engine behind its HTTP surface, in this process and without a split."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from aiohttp.test_utils import TestClient, TestServer
from support.small_models import plain_answer

from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.transformers.flags import arguments
from splitserve.orchestrator.engines.transformers.front import CANNOT
from splitserve.orchestrator.engines.transformers.server import ABSENT_ENDPOINTS, build
from splitserve.orchestrator.engines.transformers.tested_models import TESTED_MODELS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZES = ["--port", "1", "--block-size", "32", "--kv-cache-memory-bytes", str(16 * 2**20),
         "--max-model-len", "1024", "--dtype", "float32", "--threads", "1"]  # fmt: skip


@asynccontextmanager
async def served(folder: Path, *flags: str) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of an engine that runs."""
    given = ["--model", str(folder), "--served-model-name", "m", *SIZES, *flags]
    parts = build(arguments().parse_args(given))
    loop = asyncio.create_task(parts.engine.run())
    async with TestClient(TestServer(parts.api.application())) as client:
        yield client
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def ask(client: TestClient[Any, Any], path: str = COMPLETIONS, **fields: Any) -> Any:
    """The answer's JSON, of a greedy request."""
    body = {"model": "m", "temperature": 0, "max_tokens": 8} | fields
    async with client.post(path, json=body) as response:
        return await response.json()


async def refusal(client: TestClient[Any, Any], path: str, **fields: Any) -> str:
    """The words of a 400."""
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [said("x")]}
    async with client.post(path, json={"model": "m"} | body | fields) as response:
        assert response.status == 400, await response.text()
        return str((await response.json())["error"]["message"])


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_it_answers_as_the_model_does(tiny_model: Path) -> None:
    """Text, ids and chats, streamed or whole, alone or several, with usage and likelihoods."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = bytes(plain_answer(model, list(b"hello"), 8)).decode()
    async with served(tiny_model) as client:
        whole = await ask(client, prompt="hello", logprobs=1)
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected, "length")
        assert "".join(choice["logprobs"]["tokens"]) == expected
        assert choice["logprobs"]["text_offset"] == list(range(8))
        assert whole["usage"]["total_tokens"] == 13
        by_id = await ask(client, prompt="hello", logprobs=0, return_tokens_as_token_ids=True)
        names = by_id["choices"][0]["logprobs"]["tokens"]
        assert names == [f"token_id:{ord(character)}" for character in expected]
        assert (await ask(client, prompt=list(b"hello")))["choices"][0]["text"] == expected
        two = await ask(client, prompt=["hello", "hollo"], n=2)
        assert [one["text"] for one in two["choices"]][:2] == [expected] * 2
        assert len(two["choices"]) == 4
        stopped = await ask(client, prompt="hello", stop=expected[3:5])
        assert stopped["choices"][0]["text"] == expected[:3]
        assert stopped["choices"][0]["stop_reason"] == expected[3:5]
        at_id = await ask(client, prompt="hello", stop_token_ids=[ord(expected[2])])
        assert at_id["choices"][0]["stop_reason"] == ord(expected[2])
        assert len(at_id["choices"][0]["text"]) <= 2

        chat = await ask(client, CHAT, messages=[said("hello")], logprobs=True, top_logprobs=2)
        text = chat["choices"][0]["message"]["content"]
        assert [len(one["top_logprobs"]) for one in chat["choices"][0]["logprobs"]["content"]] == (
            [2] * 8
        )
        streamed = ""
        async with client.post(
            CHAT,
            json={"model": "m", "temperature": 0, "max_tokens": 8, "stream": True,
                  "messages": [said("hello")]},
        ) as response:  # fmt: skip
            async for line in response.content:
                if line.startswith(b"data: {"):
                    (event,) = json.loads(line[6:])["choices"]
                    streamed += event["delta"].get("content") or ""
        assert streamed == text
        told = await ask(client, "/tokenize", messages=[said("hello")])
        assert bytes(t for t in told["tokens"] if t < 256) == b"user\nhello\nassistant\n"
        told = await ask(client, "/detokenize", tokens=list(b"hello"))
        assert told == {"prompt": "hello"}


async def test_a_seed_is_kept(tiny_model: Path) -> None:
    """The same answer again; each of several answers has its own."""
    async with served(tiny_model) as client:
        fields = {"prompt": "hello", "temperature": 2.0, "seed": 5, "n": 3}
        first, second = [
            [one["text"] for one in (await ask(client, **fields))["choices"]] for _ in range(2)
        ]
        assert first == second
        assert len(set(first)) == 3


async def test_prefixes_are_not_shared_between_salts(tiny_model: Path) -> None:
    """The second prompt of a salt finds the first one's beginning, another salt's does not."""
    async with served(tiny_model) as client:
        cached = []
        for salt in ("a", "a", "b"):
            answer = await ask(client, prompt="x" * 100, cache_salt=salt)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 96, 0]


WRONG: dict[str, Any] = {
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "logit_bias": {"1": 2},
    "prompt_logprobs": 1,
    "best_of": 2,
    "modalities": ["audio"],
}


async def test_what_it_cannot_do_is_refused_in_words(tiny_model: Path) -> None:
    """Every field that only vLLM has, with the field's name; values that ask for nothing are taken.
    So are malformed ones refused, and endpoints that are not there.
    """
    async with served(tiny_model) as client:
        for name, (neutral, why) in CANNOT.items():
            words = await refusal(client, CHAT, **{name: WRONG.get(name, ["x"])})
            assert name in words
            assert why in words
            for value in neutral:
                assert "choices" in await ask(client, prompt="a", max_tokens=1, **{name: value})
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        assert "tool calls need vLLM" in await refusal(client, CHAT, tools=[tool])
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        assert "text only" in await refusal(client, CHAT, messages=[picture])
        assert "echo" in await refusal(client, COMPLETIONS, echo=True, logprobs=1)
        assert "top_p" in await refusal(client, COMPLETIONS, top_p=2)
        assert "n must be" in await refusal(client, COMPLETIONS, n=0)
        assert "n must be" in await refusal(client, COMPLETIONS, n=10**6)
        assert "empty string" in await refusal(client, COMPLETIONS, stop=["a", ""])
        assert "seed" in await refusal(client, COMPLETIONS, seed=10**30)
        for name in ("chat_template", "tokenize", "return_dict"):
            given = {name: "{{ messages }}"}
            assert name in await refusal(client, CHAT, chat_template_kwargs=given)
        assert "out of vocabulary" in await refusal(client, COMPLETIONS, prompt=[5000])
        assert "maximum context" in await refusal(client, COMPLETIONS, prompt="a" * 1024)
        assert "logprobs" in await refusal(client, CHAT, top_logprobs=2)
        for path in ABSENT_ENDPOINTS:
            assert path in await refusal(client, path)


async def test_odd_numbers_end_no_other_request(tiny_model: Path) -> None:
    """Tokens that do not exist and penalties beyond any number: an answer, and the engine goes
    on.
    """
    async with served(tiny_model) as client:
        odd = {"stop_token_ids": [10**9, -3], "min_tokens": 2, "repetition_penalty": 1e-300,
               "temperature": 1.0}  # fmt: skip
        for fields in (odd, {"temperature": 1e30}, {"temperature": 2e-5, "top_p": 1e-9}):
            assert len((await ask(client, prompt="hello", **fields))["choices"]) == 1
        async with client.get("/health") as response:
            assert response.status == 200


async def test_tools_that_are_not_called_are_part_of_the_prompt(tiny_model: Path) -> None:
    """As in the prefill leg of a request whose answer another engine parses."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with served(tiny_model) as client:
        answer = await ask(client, CHAT, messages=[said("x")], tools=[tool], tool_choice="none")
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_goes_on_where_another_engine_left_it(tiny_model: Path) -> None:
    """A character and a stop string that begin before the seam end behind it; the tokens are those
    of the whole answer. Only what this cluster has sealed says where the seam is.
    """
    async with served(tiny_model) as client:
        whole = await ask(client, prompt="hello", max_tokens=12, return_token_ids=True)
        text, tokens = whole["choices"][0]["text"], whole["choices"][0]["token_ids"]
        leg = TransferParams(transfer_id="t", role="alone", peer_incarnation="", resumed_tokens=5)
        fields = {"prompt": [*b"hello", *tokens[:5]], "max_tokens": 7}
        sealed = {"kv_transfer_params": seal(leg, b"")}
        rest = await ask(client, **fields, **sealed)
        assert rest["choices"][0]["text"] == text[5:]
        stopped = await ask(client, **fields, **sealed, stop=text[3:7])
        (choice,) = stopped["choices"]
        # the first engine could give out but two characters: a stop string might have begun there
        assert (choice["text"], choice["stop_reason"]) == (text[2], text[3:7])
        told = await ask(
            client,
            CHAT,
            messages=[said("x")],
            max_tokens=7,
            kv_transfer_params=seal(leg, b"") | {"prompt_token_ids": fields["prompt"]},
        )
        assert told["choices"][0]["message"]["content"] == text[5:]
        other = await ask(
            client, **fields, kv_transfer_params=seal(leg, b"another's"), stop=text[3:7]
        )
        assert other["choices"][0]["text"] == text[5:]


async def test_a_text_of_several_bytes_a_character_is_whole(tiny_model: Path) -> None:
    """A character comes when its last byte has come; half of one never does."""
    async with served(tiny_model) as client:
        told = await ask(client, prompt="é", echo=True, max_tokens=1)
        assert told["choices"][0]["text"].startswith("é")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "tested: " + ", ".join(TESTED_MODELS)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "no quantised weights"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "depend on the longest"),
        ({"max_position_embeddings": 100}, "more than the 100 tokens"),
    ],
)
def test_models_that_were_not_tested_are_refused(
    tiny_model: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """Before a weight is read, with the reason."""
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        build(arguments().parse_args(["--model", str(tmp_path), *SIZES]))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-cache-memory-bytes", "1000"], "max_model_len 1024 needs"),
        (["--kv-transfer-config", "{}"], "missing required field"),
    ],
)
def test_what_cannot_work_is_refused(tiny_model: Path, flags: list[str], words: str) -> None:
    """With a sentence that names the flag."""
    with pytest.raises(ValueError, match=words):
        build(arguments().parse_args(["--model", str(tiny_model), *SIZES, *flags]))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(ValueError, match="missing"):
        build(arguments().parse_args(["--model", str(tmp_path / "missing"), *SIZES]))
