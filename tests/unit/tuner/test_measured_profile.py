"""Which nodes are measured, and what a profile says of them."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.orchestrator.tuner.measured_profile import (
    build_profile,
    hardware_of,
    limits_of,
    neighbours_of,
    nodes_to_measure,
)
from splitserve.orchestrator.tuner.probe_plan import DecodeProbe, PrefillProbe
from splitserve.orchestrator.tuner.probing import Measured, ProbeError
from splitserve.orchestrator.tuner.profile_fit import (
    BesideSample,
    DecodeSample,
    PrefillSample,
    SplitSample,
    TransferSample,
)


def node(role: str, **changes: Any) -> dict[str, Any]:
    """As the router's status has it."""
    return {
        "role": role,
        "is_usable": True,
        "is_flipping": False,
        "phase": "ready",
        "model": "m",
        "engine": "vllm 1",
        "hardware": "a processor, 4 cores",
        "host": "h0",
        "fingerprint": {"weights": "w"},
        "step_limit_tokens": 512,
        "running_limit_requests": 32,
        "kv_bytes_per_token": 1000,
        "block_tokens": 16,
        "total_blocks": 100,
        "max_model_len": 2048,
    } | changes


def test_takes_nodes_that_work() -> None:
    """By role, without those that are on their way to another one or take no work."""
    nodes = {
        "p0": node("prefill"),
        "p1": node("prefill", is_usable=False, phase="loading"),
        "p2": node("prefill", is_flipping=True),
        "d1": node("decode"),
        "d0": node("decode"),
    }
    assert nodes_to_measure(nodes) == (["p0"], ["d0", "d1"])


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({}, "no prefill node takes work.*no node"),
        ({"p0": node("prefill")}, r"no decode node takes work.*p0 \(prefill, usable\)"),
        (
            {"p0": node("prefill"), "d0": node("decode", is_usable=False, phase="loading")},
            r"no decode node.*d0 \(decode, loading\)",
        ),
        (
            {"p0": node("prefill"), "d0": node("decode", step_limit_tokens=0)},
            "engine of d0 does not say max_num_batched_tokens",
        ),
    ],
)
def test_what_cannot_be_measured(nodes: dict[str, Any], words: str) -> None:
    """Is said with who is there."""
    with pytest.raises(ProbeError, match=words):
        nodes_to_measure(nodes)


def test_the_tightest_limit_counts() -> None:
    """A profile is for all of its nodes."""
    nodes = {
        "p": node("prefill", total_blocks=80, max_model_len=4096),
        "d": node("decode", running_limit_requests=8, step_limit_tokens=256),
    }
    limits = limits_of(nodes, ["p", "d"])
    assert (limits.step_tokens, limits.sequences) == (256, 8)
    assert (limits.total_blocks, limits.max_model_len) == (80, 2048)


def test_the_hardware_in_words() -> None:
    """Each kind once, with how many nodes of which role it has."""
    nodes = {
        "p0": node("prefill", hardware="1 x A"),
        "p1": node("prefill", hardware="1 x A"),
        "d0": node("decode", hardware="1 x A"),
        "d1": node("decode", hardware=""),
    }
    assert hardware_of(nodes, list(nodes)) == "2 prefill and 1 decode on 1 x A; 1 decode on unknown"


def test_neighbours_share_a_host() -> None:
    """Of those that are measured; nodes that do not know their host have none."""
    nodes = {
        "p0": node("prefill"),
        "p1": node("prefill", host="h1"),
        "d0": node("decode"),
        "d1": node("decode", host=""),
        "d2": node("decode", host=""),
        "d3": node("decode"),
    }
    found = neighbours_of(nodes, ["p0", "p1", "d0", "d1", "d2"])
    assert found == {"p0": ["d0"], "p1": [], "d0": ["p0"], "d1": [], "d2": []}


def test_a_profile_says_what_neighbours_do() -> None:
    """Fitted from what was made twice, with the most nodes of one host; hosts with one node each
    have nothing of it.
    """
    nodes = {name: node(role) for name, role in (("p", "prefill"), ("d", "decode"))}
    measured = Measured(
        prefill=[PrefillSample(PrefillProbe(n), 0.01 + 0.001 * n) for n in (8, 64, 300, 512, 900)],
        decode=[
            DecodeSample(DecodeProbe(n, 16 * c), 0.02 + 0.001 * n + 1e-5 * c * n)
            for n in (1, 2, 4)
            for c in (1, 9)
        ],
        transfer=[TransferSample("p", "d", n, n - 1, 0.05 + n * 1e-5) for n in (33, 100, 300)],
        split=[SplitSample(n, 0.01 + 0.001 * n, 0.1 + 0.0015 * n) for n in (100, 200, 300, 500)],
        prefill_beside=[BesideSample(seconds, seconds * 1.2) for seconds in (0.1, 0.2, 0.3)],
        decode_beside=[BesideSample(seconds, seconds * 1.5) for seconds in (0.02, 0.03, 0.04)],
    )
    found = build_profile(measured, nodes, ["p", "d"], now_unix_s=1.0)
    assert found.nodes_per_host == 2
    assert found.prefill.sending_s.value > 1e-4
    assert found.prefill.neighbour.value == pytest.approx(0.2, abs=0.05)
    assert found.decode.neighbour.value == pytest.approx(0.5, abs=0.01)
    measured.prefill_beside, measured.decode_beside = [], []
    nodes["d"]["host"] = "h1"
    apart = build_profile(measured, nodes, ["p", "d"], now_unix_s=1.0)
    assert not apart.has_neighbours
    assert apart.nodes_per_host == 1


def test_too_little_says_why() -> None:
    """The most frequent reason for what was left out."""
    nodes = {"p": node("prefill"), "d": node("decode")}
    measured = Measured(left_out=["x: d is busy", "y: d is busy", "z: other"])
    with pytest.raises(ProbeError, match="3 probes were left out, most because d is busy"):
        build_profile(measured, nodes, ["p", "d"], now_unix_s=1.0)
