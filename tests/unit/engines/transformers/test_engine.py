"""Answers over pages are those of transformers' own attention, however requests share steps, pages
and prefixes.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.small_models import LAYERS, VOCABULARY, Rig, plain_answer, random_model

from splitserve.orchestrator.engines.transformers.tested_models import TESTED_MODELS

MODELS = {name: random_model(name) for name in TESTED_MODELS}


def prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, VOCABULARY) for _ in range(tokens)]


@pytest.mark.parametrize("model_type", TESTED_MODELS)
async def test_answers_are_those_of_plain_attention(model_type: str) -> None:
    """Of every type that the engine accepts: prompts of odd lengths in one batch, in steps that cut
    them into pieces and mix them with answers that have begun.
    """
    model = MODELS[model_type]
    prompts = {name: prompt(tokens, tokens) for name, tokens in (("a", 5), ("b", 70), ("c", 129))}
    expected = {name: plain_answer(model, text, 6) for name, text in prompts.items()}
    rig = Rig(model, step_tokens=50)
    for name, text in prompts.items():
        rig.add(name, text, 6)
    answers = await rig.finish()
    found = {name: [one.token for one in answer] for name, answer in answers.items()}
    assert found == expected
    assert len(set(map(tuple, found.values()))) == 3, "the model tells the prompts apart"


@pytest.mark.parametrize("order", ["rows", "vec"])
async def test_a_prefix_in_the_pages_is_used(order: str) -> None:
    """A prompt whose beginning another one has left there computes the rest only, and its answer is
    the same; with that KV zeroed, or a token further, it is another one.
    """
    model = MODELS["llama"]
    first, rest = prompt(96, 1), prompt(20, 2)
    expected = plain_answer(model, first + rest, 8)
    for spoil, is_same in ((None, True), ("zeroed", False), ("shifted", False)):
        rig = Rig(model, order)
        before = rig.add("before", first, 1)
        await rig.finish()
        assert before.cached == 0
        if spoil == "zeroed":
            rig.memory._pages.zero_()
        if spoil == "shifted":
            rig.memory._pages.copy_(rig.memory._pages.roll(1, -1))
        request = rig.add("after", first + rest, 8)
        answers = await rig.finish()
        assert request.cached == 96
        assert ([one.token for one in answers["after"]] == expected) is is_same, spoil


async def test_answers_are_right_when_blocks_run_out() -> None:
    """Requests lose their blocks to others in the middle of their answers, and begin again in pages
    that others have left full: every answer is that of the request alone.
    """
    model = MODELS["llama"]
    prompts = {f"r{n}": prompt(40 + n, 50 + n) for n in range(5)}
    expected = {name: plain_answer(model, text, 30) for name, text in prompts.items()}
    rig = Rig(model, blocks=9)
    for name, text in prompts.items():
        rig.add(name, text, 30)
    preempted, found = 0, {name: list[int]() for name in prompts}
    while rig.scheduler.has_work:
        plan, sampled = await rig.planned_step()
        preempted += len(plan.preempted)
        for name, new in sampled.items():
            found[name].append(new.token)
    assert preempted > 0
    assert found == expected


async def test_layers_are_told_in_order() -> None:
    """Once each in a step that computes; their pages hold the step's tokens by then. A step without
    work tells nothing.
    """
    rig = Rig(MODELS["llama"])
    rig.add("a", prompt(9, 3), 1)
    await rig.step()
    await rig.step()
    assert rig.layers_done == list(range(LAYERS))


async def test_a_model_that_computes_otherwise_ends_the_engine() -> None:
    """Not a wrong answer: the layer says what it asked for."""
    rig = Rig(MODELS["llama"])
    query = key = torch.zeros(1, 2, 1, 32)
    module = rig.model.model.layers[0].self_attn
    rig.add("a", [1, 2, 3], 1)
    await rig.step()
    with pytest.raises(ValueError, match="softcap"):
        rig.attention(module, query, key, key, None, softcap=30.0)
    with pytest.raises(ValueError, match="mask"):
        rig.attention(module, query, key, key, torch.zeros(1))
