"""A profile is read as it was written, and refused with the field that is wrong."""

from __future__ import annotations

import json

import msgspec
import pytest

from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    Estimate,
    PrefillTime,
    Profile,
    ProfileError,
    TransferTime,
    exactly,
    parse_profile,
    write_profile,
)

PROFILE = Profile(
    model="m",
    engine="mock 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=512, sequences=16, block_tokens=16, total_blocks=1000, max_model_len=4096
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.01), Estimate(0.001, 0.0009, 0.0011), exactly(1e-6)),
    decode=DecodeTime(exactly(0.02), exactly(0.001), exactly(1e-5)),
    transfers=(
        TransferTime("", "", exactly(0.002), exactly(1e9)),
        TransferTime("p", "d", exactly(0.5), exactly(1e6)),
    ),
)


def test_is_read_as_it_was_written() -> None:
    """Nothing is lost in the file."""
    assert parse_profile(write_profile(PROFILE), "p.json") == PROFILE


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("limits", "sequences"), 0, "$.limits.sequences"),
        (("prefill", "base_s", "value"), -1, "$.prefill.base_s.value"),
        (("prefill", "token_s", "low"), 1.0, "$.prefill.token_s"),
        (("version",), 99, "version 99"),
        (("transfers",), [], "$.transfers"),
    ],
)
def test_names_the_field(path: tuple[str, ...], value: object, said: str) -> None:
    """A wrong value is refused by its place."""
    tree = msgspec.json.decode(write_profile(PROFILE))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ProfileError, match=r"p\.json") as caught:
        parse_profile(msgspec.json.encode(tree), "p.json")
    assert said in str(caught.value)


def test_no_json() -> None:
    """A file that is something else is refused."""
    with pytest.raises(ProfileError, match=r"p\.json is no JSON"):
        parse_profile(b"prefill: 1", "p.json")


def test_a_mixed_step_reads_the_weights_once() -> None:
    """The smaller base is saved; a step of one kind is that kind's time."""
    alone = PROFILE.prefill.seconds(100, 50)
    decode = PROFILE.decode.seconds(4, 2000)
    attended = 100 * (50 + 50)
    assert PROFILE.step_seconds(100, attended, 0, 0) == pytest.approx(alone)
    assert PROFILE.step_seconds(0, 0, 4, 2000) == pytest.approx(decode)
    assert PROFILE.step_seconds(100, attended, 4, 2000) == pytest.approx(alone + decode - 0.01)
    assert PROFILE.step_seconds(0, 0, 0, 0) == 0


def test_what_a_neighbour_adds() -> None:
    """Its part of each kind of work; a shared base counts once, as work on the prompt would. Hosts
    with one node, and nodes that do not slow each other, have no neighbours.
    """
    slowed = msgspec.structs.replace(
        PROFILE,
        nodes_per_host=2,
        prefill=msgspec.structs.replace(PROFILE.prefill, neighbour=exactly(0.2)),
        decode=msgspec.structs.replace(PROFILE.decode, neighbour=exactly(0.5)),
    )
    attended = 100 * (50 + 50)
    prompt_s, decode_s = PROFILE.prefill.seconds(100, 50), PROFILE.decode.seconds(4, 2000)
    assert slowed.neighbour_seconds(100, attended, 0, 0) == pytest.approx(0.2 * prompt_s)
    assert slowed.neighbour_seconds(0, 0, 4, 2000) == pytest.approx(0.5 * decode_s)
    both = 0.2 * (prompt_s - 0.01) + 0.5 * decode_s
    assert slowed.neighbour_seconds(100, attended, 4, 2000) == pytest.approx(both)
    assert slowed.has_neighbours
    assert not msgspec.structs.replace(slowed, nodes_per_host=1).has_neighbours
    assert not msgspec.structs.replace(PROFILE, nodes_per_host=2).has_neighbours


def test_a_profile_that_knows_of_no_neighbours() -> None:
    """As they were written before: each node has a host of its own."""
    told = json.loads(write_profile(PROFILE))
    del told["nodes_per_host"], told["prefill"]["neighbour"], told["decode"]["neighbour"]
    del told["prefill"]["sending_s"]
    found = parse_profile(json.dumps(told).encode(), "p")
    assert found == PROFILE
    assert (found.nodes_per_host, found.prefill.neighbour) == (1, exactly(0.0))


def test_a_pair_that_was_not_measured() -> None:
    """It is like any pair."""
    assert PROFILE.transfer("p", "d").latency_s.value == 0.5
    assert PROFILE.transfer("p", "x").latency_s.value == 0.002
