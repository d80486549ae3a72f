"""Which codec a tier's new chunks get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.kv_numbers import body_like_kv, chunk_of

from splitserve.kv_transfer.cache.chunk_coding import Trial
from splitserve.kv_transfer.cache.codec_choice import ATTEMPTS_LIMIT, CodecChoice
from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tier_book import TierBook
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

ALL: Any = ("bf16z", "int8", "int5z")
TRIALS = [
    Trial("bf16z", 1.45, 0.5e9, 2.0e9), Trial("int8", 1.96, 0.5e9, 4e9),
    Trial("int5z", 3.4, 0.3e9, 1.2e9),
]  # fmt: skip


def auto(codecs: Any = ALL) -> CodecChoice:
    choice = CodecChoice("auto", codecs)
    for trial in TRIALS:
        if trial.codec in codecs:
            choice.tried(trial)
    return choice


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (None, "raw"),
        (50e6, "int5z"),
        (300e6, "int5z"),
        (500e6, "int8"),
        (1.0e9, "int8"),
        (3e9, "raw"),
        (8e9, "raw"),
    ],
)  # fmt: skip
def test_auto_takes_what_is_in_pages_soonest(link: float | None, expected: str) -> None:
    """Over a slow link the fewest bytes, over a fast one those that need no work; as they are
    before the link was measured.
    """
    assert auto().choose(link) == expected


def test_auto_keeps_bytes_until_codecs_were_measured() -> None:
    """And takes none that was not allowed."""
    assert CodecChoice("auto", ALL).choose(1e6) == "raw"
    assert auto(("bf16z",)).choose(1e6) == "bf16z"
    assert not auto(("bf16z",)).takes("int8")


def test_a_small_gain_is_not_worth_it() -> None:
    """Less than a tenth of the time."""
    choice = CodecChoice("auto", ALL)
    choice.tried(Trial("int8", 2.0, 1e9, 2.2e9))
    assert choice.choose(1e9) == "raw"  # 0.95 of the time
    assert choice.choose(0.8e9) == "int8"


def test_a_codec_of_its_own_is_used_at_any_rate() -> None:
    """Without measurements too."""
    assert CodecChoice("int5z").choose(None) == CodecChoice("int5z").choose(1e12) == "int5z"


def test_what_has_lost_more_is_not_taken() -> None:
    """A tier that keeps KV to the bit takes only what was kept so; one that loses takes what has
    lost less.
    """
    takes = {
        codec: [name for name in ("raw", *ALL) if CodecChoice(codec).takes(name)]
        for codec in ("raw", *ALL)
    }
    assert takes == {
        "raw": ["raw", "bf16z"],
        "bf16z": ["raw", "bf16z"],
        "int8": ["raw", "bf16z", "int8"],
        "int5z": ["raw", "bf16z", "int8", "int5z"],
    }


def test_codecs_are_tried_a_few_times() -> None:
    """Until they were measured; not for ever where they cannot be."""
    choice = CodecChoice("auto", ALL)
    assert choice.to_try() == ALL
    choice.tried(TRIALS[1])
    assert choice.to_try() == ("bf16z", "int5z")
    for _ in range(ATTEMPTS_LIMIT):
        choice.to_try()
    assert choice.to_try() == ()
    assert CodecChoice("raw").to_try() == ()


def test_speeds_count_what_arrives_in_pages() -> None:
    """A link of 100 MB/s brings 3.4 times as much, less the time to decode it."""
    assert auto().load_bytes_per_s(100e6, is_measured=False) == 100e6
    assert auto().load_bytes_per_s(100e6, is_measured=True) == pytest.approx(264e6, rel=0.01)
    assert CodecChoice("int8").load_bytes_per_s(100e6, is_measured=True) == 100e6


def book(codec: Any) -> TierBook:
    return TierBook(
        1, TierSettings(type="disk", capacity_bytes=10**9, codec=codec), is_exclusive=True,
        write_limit_bytes=10**9, quotas=lambda _: None,
    )  # fmt: skip


KEY = bytes(32)


def test_a_tier_orders_its_codec_and_counts_what_it_takes() -> None:
    """Its capacity is filled by what is stored; that some chunks have another size is nothing."""
    tier = book("int8")
    chunk = chunk_of(body_like_kv())
    order = tier.write(KEY, b"", chunk)
    assert order is not None
    assert (order.codec, order.trials) == ("int8", ("int8",))
    size = HEADER_BYTES + 40_000
    tier.written(KEY, b"", "written", 1.0, size, TRIALS[1:2])
    assert tier.index is not None
    assert tier.index.used_bytes == size
    assert tier.counters["written_bytes"] == size
    assert tier.counters["coded_chunks"] == 1
    order = tier.write(bytes([1]) * 32, b"", chunk)
    assert order is not None
    assert order.trials == ()


def test_a_tier_refuses_what_was_lossy() -> None:
    """It is counted; a coded chunk that it takes is not to be coded again."""
    chunk = replace(chunk_of(body_like_kv()), codec="int8")
    exact, lossy = book("raw"), book("int5z")
    assert exact.write(KEY, b"", chunk) is None
    assert exact.counters["writes_too_lossy"] == 1
    order = lossy.write(KEY, b"", chunk)
    assert order is not None
    assert (order.codec, order.trials) == ("raw", ())
