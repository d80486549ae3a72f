"""An answer's text is the same whether one engine makes it or a second one goes on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from splitserve.kv_transfer.channel import SECRET_ENV
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.vllm import resumed_answers

if TYPE_CHECKING:
    from pathlib import Path

SECRET = bytes(range(32))
TEXT = "naïve 🙂🧑‍🚀 日本語, then END and more: ENDE"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin works in this process, for this test."""
    make = IncrementalDetokenizer.__dict__["from_new_request"]
    monkeypatch.setenv(SECRET_ENV, SECRET.hex())
    monkeypatch.setattr(IncrementalDetokenizer, "from_new_request", make)
    resumed_answers.install()


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Any:
    """A byte-level tokenizer that splits rare characters over several tokens."""
    return AutoTokenizer.from_pretrained(real_model)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop": ["END", "never"]},
        {"stop": ["then END"], "include_stop_str_in_output": True},
        {"stop": ["ENDE"], "min_tokens": 12},
        {"stop": ["END"], "min_tokens": 30},
        {"skip_special_tokens": False},
    ],
    ids=str,
)
def test_the_seam_is_nowhere_to_be_seen(tokenizer: Any, sampling: dict[str, Any]) -> None:
    """Wherever the answer is taken over, between the tokens of one character or within a stop
    string too: each token brings the text that it would have brought, and the answer ends where it
    would have ended.
    """
    prompt = tokenizer.encode("The prompt ends in a snowman's first half: ")
    ids = [*tokenizer.encode(TEXT), tokenizer.eos_token_id]
    whole = texts(IncrementalDetokenizer.from_new_request(tokenizer, ask(prompt, sampling)), ids)
    assert len(whole) > 10
    for seam in range(1, len(whole)):
        rest = dict(sampling)
        if "min_tokens" in rest:
            rest["min_tokens"] = max(0, rest["min_tokens"] - seam)
        request = ask([*prompt, *ids[:seam]], rest, resumed=seam)
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        assert texts(detokenizer, ids[seam:]) == whole[seam:], f"seam behind token {seam}"


def test_what_this_cluster_did_not_seal_changes_nothing(tokenizer: Any) -> None:
    """Tokens count as resumed only with the cluster's MAC."""
    prompt = tokenizer.encode("a 🙂")
    request = ask(prompt[:-1], {}, resumed=1)
    forged = request.sampling_params.extra_args["kv_transfer_params"]["splitserve"]
    forged["mac"] = "0" * 32
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert detokenizer.num_output_tokens() == 0


def ask(prompt: list[int], sampling: dict[str, Any], resumed: int = 0) -> EngineCoreRequest:
    """A request as vLLM's API server makes it."""
    params = SamplingParams(max_tokens=100, **sampling)
    if resumed:
        alone = TransferParams(
            transfer_id="t", role="alone", peer_incarnation="", resumed_tokens=resumed
        )
        params.extra_args = {"kv_transfer_params": seal(alone, SECRET)}
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def texts(detokenizer: Any, ids: list[int]) -> list[str]:
    """What each token brings, up to the one that completes a stop string."""
    found = []
    for number, token in enumerate(ids):
        stop = detokenizer.update([token], False)
        is_last = stop is not None or number == len(ids) - 1
        found.append(detokenizer.get_next_output_text(is_last, True))
        if stop is not None:
            break
    return found
