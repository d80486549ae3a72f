"""What every codec must do, with every kind of number: what comes back, and what is refused."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.kv_numbers import like_kv

from splitserve.kernels.quantise import NUMBERS, read_numbers, write_numbers
from splitserve.kv_transfer.cache.codecs.base import (
    FRONT_BYTES,
    FrameError,
    LayerShape,
    decode_layer,
    encode_layer,
)
from splitserve.kv_transfer.cache.codecs.names import CODED, LOSS, LOSSLESS, LOSSY, worst_of
from splitserve.kv_transfer.cache.codecs.registry import codec_named

if TYPE_CHECKING:
    import numpy.typing as npt

    from splitserve.kv_transfer.cache.codecs.base import Bytes

SHAPES = [
    (3, 256, 64, 64),
    (1, 1, 1, 1),
    (2, 37, 5, 3),
    (4, 16, 96, 0),
    (1, 3, 2, 2),
    (2, 300, 8, 24),
]
"""Heads, tokens, key items, value items."""
LEVELS = {"int8": 127, "int5z": 15}
SIGNIFICANT = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SCALE_SLACK = 1 + 2.0**-7
"""A scale has eight significant bits and is rounded up."""


@pytest.fixture(params=CODED)
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


def shape_of(sizes: tuple[int, int, int, int], number: str) -> LayerShape:
    return LayerShape(*sizes, number)


def rows_of(values: npt.NDArray[np.float32], number: str) -> Bytes:
    """Values as pages of that kind have them."""
    out = np.empty((*values.shape[:2], values.shape[2] * NUMBERS[number]), np.uint8)
    write_numbers(values.copy(), number, out)
    return out


def values_of(shape: LayerShape) -> npt.NDArray[np.float32]:
    return like_kv(shape.heads, shape.tokens, shape.key_items + shape.value_items)


def round_trip(name: str, rows: Bytes, shape: LayerShape, *, begins: bool = False) -> Bytes:
    frame = encode_layer(codec_named(name), rows, shape, begins_prompt=begins)
    out = np.empty_like(rows)
    decode_layer(codec_named(name), memoryview(frame), shape, slice(0, shape.heads), out)
    return out


def cases() -> list[Any]:
    return list(itertools.product(SHAPES, NUMBERS, (False, True)))


@pytest.mark.parametrize(("sizes", "number", "begins"), cases())
def test_what_comes_back_is_within_the_codecs_bound(
    name: str, sizes: Any, number: str, begins: bool
) -> None:
    """Lossless ones to the bit; the others within half a step of the group's scale, and the first
    tokens of a prompt to the bit where the codec keeps them.
    """
    shape = shape_of(sizes, number)
    rows = rows_of(values_of(shape), number)
    found = round_trip(name, rows, shape, begins=begins)
    if name in LOSSLESS:
        assert np.array_equal(found, rows)
        return
    codec = codec_named(name)
    kept = min(4, shape.tokens) if begins and codec.keeps_sinks else 0
    assert np.array_equal(found[:, :kept], rows[:, :kept])
    before, after = read_numbers(rows, number)[:, kept:], read_numbers(found, number)[:, kept:]
    if not before.size:
        return
    keys, values = before[..., : shape.key_items], before[..., shape.key_items :]
    if name == "int5z":
        keys = keys - keys.mean(axis=1, keepdims=True)
    steps = [np.abs(keys).max(axis=1, keepdims=True).repeat(keys.shape[1], 1)]
    if values.size:
        steps.append(np.abs(values).max(axis=2, keepdims=True).repeat(shape.value_items, 2))
    bound = np.concatenate(steps, axis=2) / LEVELS[name] * SCALE_SLACK**2 / 2
    rounding = np.maximum(np.abs(before), np.abs(after)) * SIGNIFICANT[number] + 1e-6
    mean_rounding = np.abs(before).max() * 2.0**-8 / LEVELS[name]
    assert np.all(np.abs(before - after) <= bound + rounding + mean_rounding)


@pytest.mark.parametrize("number", NUMBERS)
def test_heads_come_back_alone(name: str, number: str) -> None:
    """A tensor-parallel rank reads its heads only, and gets what all get."""
    shape = shape_of((6, 40, 16, 8), number)
    rows = rows_of(values_of(shape), number)
    frame = memoryview(encode_layer(codec_named(name), rows, shape, begins_prompt=True))
    whole, own = np.empty_like(rows), np.empty_like(rows[2:4])
    decode_layer(codec_named(name), frame, shape, slice(0, 6), whole)
    decode_layer(codec_named(name), frame, shape, slice(2, 4), own)
    assert np.array_equal(own, whole[2:4])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("what", ["zeros", "tiny", "one large", "largest", "constant"])
def test_odd_numbers_stay_finite(name: str, number: str, what: str) -> None:
    """Zeros come back as zeros; nothing becomes infinite or no number."""
    shape = shape_of((2, 24, 8, 8), number)
    values = np.zeros((2, 24, 16), np.float32)
    largest = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}[number]
    if what == "tiny":
        values += 1e-39
    elif what == "one large":
        values[1, 5, 3], values[0, 2, 12] = 6e4, -6e4
    elif what == "largest":
        values[:] = largest
        values[0] *= -1
    elif what == "constant":
        values += 1.5
    rows = rows_of(values, number)
    found = read_numbers(round_trip(name, rows, shape), number)
    assert np.isfinite(found).all()
    if what == "zeros":
        assert not found.any()
    if what in ("one large", "largest", "constant"):
        before = read_numbers(rows, number)
        assert np.abs(found - before).max() <= np.abs(before).max() * 0.04


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_stored_as_it_is(name: str, number: str, odd: float) -> None:
    """One such number among many: the layer comes back to the bit."""
    shape = shape_of((2, 24, 8, 8), number)
    values = values_of(shape)
    values[1, 7, 3] = odd
    rows = rows_of(values, number)
    assert np.array_equal(round_trip(name, rows, shape), rows)


def test_noise_is_not_made_larger(name: str) -> None:
    """Bytes without any structure, of which some are no numbers: kept, four bytes longer."""
    shape = shape_of((2, 64, 16, 16), "bfloat16")
    rows = np.random.default_rng(1).integers(0, 256, (2, 64, 64), np.uint8)
    frame = encode_layer(codec_named(name), rows, shape, begins_prompt=False)
    assert len(frame) <= shape.layer_bytes + FRONT_BYTES
    assert np.array_equal(round_trip(name, rows, shape), rows)


@pytest.mark.parametrize("begins", [False, True])
def test_a_frame_that_is_cut_is_refused(name: str, begins: bool) -> None:
    """At every length but its own, and with bytes behind it; never an error of another kind."""
    shape = shape_of((2, 9, 4, 4), "bfloat16")
    rows = rows_of(values_of(shape), "bfloat16")
    codec, out = codec_named(name), np.empty_like(rows)
    frame = encode_layer(codec, rows, shape, begins_prompt=begins)
    for length in range(len(frame)):
        with pytest.raises(FrameError):
            decode_layer(codec, memoryview(frame[:length]), shape, slice(0, 2), out)
    with pytest.raises(FrameError):
        decode_layer(codec, memoryview(frame + b"\0"), shape, slice(0, 2), out)


def test_any_bytes_are_a_frame_or_refused(name: str) -> None:
    """Random bytes, and a good frame with one byte changed: rows of the right size, or the one
    error.
    """
    shape = shape_of((2, 9, 4, 4), "bfloat16")
    rows = rows_of(values_of(shape), "bfloat16")
    codec, out = codec_named(name), np.empty_like(rows)
    rng = np.random.default_rng(2)
    good = encode_layer(codec, rows, shape, begins_prompt=True)
    refused = 0
    for turn in range(400):
        frame = bytearray(rng.bytes(int(rng.integers(0, 300))) if turn % 2 else good)
        if turn % 2 == 0:
            frame[int(rng.integers(len(frame)))] ^= int(rng.integers(1, 256))
        try:
            decode_layer(codec, memoryview(bytes(frame)), shape, slice(0, 2), out)
        except FrameError:
            refused += 1
    assert refused >= 200


def test_real_sized_layers_become_smaller() -> None:
    """Of 256 tokens in bfloat16, with three heads of 64 channels: at least as the names promise."""
    shape = shape_of((3, 256, 64, 64), "bfloat16")
    rows = rows_of(values_of(shape), "bfloat16")
    sizes = {
        name: len(encode_layer(codec_named(name), rows, shape, begins_prompt=False))
        for name in CODED
    }
    ratios = {name: shape.layer_bytes / size for name, size in sizes.items()}
    assert ratios["int8"] > 1.96
    assert ratios["int5z"] > 3.2
    assert ratios["bf16z"] > 1.3


def test_names_know_what_is_lost() -> None:
    """Keys name the worst codec, and none where nothing is lost."""
    assert set(LOSS) == {"raw", *CODED}
    assert worst_of(["raw", "bf16z"]) == worst_of([]) == "raw"
    assert worst_of(["bf16z", "int8", "raw"]) == "int8"
    assert worst_of(["int8", "int5z"]) == "int5z"
    assert LOSSY == ("int8", "int5z")
    with pytest.raises(ValueError, match="known: bf16z, int8, int5z"):
        codec_named("fp8")
