"""Which nodes may take part."""

from __future__ import annotations

from typing import Any

import pytest
from router_stubs.core_story import Driver, names

from splitserve.orchestrator.core.effects import AcceptNode, RefuseNode


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": {"weights": "w2", "dtype": "float32"}}, ("weights", "w1", "w2")),
        ({"fingerprint": {"weights": "w1"}}, ("dtype", "float32", "(none)")),
        ({"block_tokens": 32}, ("block_tokens", "16", "32")),
        ({"model": "other"}, ("model", "m", "other")),
        ({"transport": "local"}, ("transport", "tcp", "local")),
    ],
)
def test_a_node_that_differs_is_refused(changes: dict[str, Any], named: tuple[str, ...]) -> None:
    """The reason names the key and both values, and the node gets no work."""
    driver = Driver("p0")
    (effect,) = driver.join("d0", **changes)
    assert isinstance(effect, RefuseNode)
    for word in (*named, "p0", "d0"):
        assert word in effect.reason
    driver.report("d0")
    assert names(driver.request("r1")) == ["AnswerError", "EndRequest"]
    assert driver.core.membership.refused == {"d0": effect.reason}


def test_a_refused_node_can_come_back_repaired() -> None:
    """The refusal is forgotten with the next good hello."""
    driver = Driver("p0")
    driver.join("d0", block_tokens=32)
    assert driver.join("d0", incarnation="d0-2") == [AcceptNode("d0")]
    assert not driver.core.membership.refused


def test_a_node_with_another_max_model_len_is_accepted() -> None:
    """Length limits are the engines' business."""
    driver = Driver("p0")
    assert driver.join("d0", max_model_len=64) == [AcceptNode("d0")]


def test_an_unknown_role_is_refused() -> None:
    """Roles are ``prefill`` and ``decode``."""
    (effect,) = Driver().join("d0", role="both")
    assert isinstance(effect, RefuseNode)
    assert "both" in effect.reason


def test_a_role_can_change() -> None:
    """The same incarnation with another role gets that role's work from now on."""
    driver = Driver("p0", "d0")
    assert names(driver.join("p0", role="decode")) == ["AcceptNode"]
    assert len(driver.core.membership.usable("decode")) == 2
