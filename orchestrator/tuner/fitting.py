"""Fits of times that are sums of a few non-negative parts, each with a 95 % band.

``seconds = rows @ parts``, with ``parts >= 0`` and errors that are relative: a long time may be
wrong by more. Outliers (a step that something else delayed) count with Huber's weights. The bands
are those of the M-estimator (Huber 1981, ch. 7) for parts that may be negative, put around the
value that may not, and never below zero.

Pure: numpy and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.orchestrator.tuner.profile import Estimate

Floats = npt.NDArray[np.float64]

JITTER_S = 0.0005
"""What any time is wrong by, however short."""
HUBER_LIMIT = 2.0
"""Residuals, in robust standard deviations, from which an observation counts less."""
ROUNDS = 8
WIDENED = 1.1
"""What the bands get on top: with few observations a robust spread is rather too small."""
FOLDS = 5


class FitError(ValueError):
    """There are too few different observations."""


@dataclass(frozen=True)
class Fit:
    """The parts of a time."""

    parts: tuple[Estimate, ...]
    error: float
    """Median relative error of observations, each predicted from a fit of others."""

    def seconds(self, row: Floats) -> float:
        """The time that a row is expected to take."""
        return float(sum(part.value * x for part, x in zip(self.parts, row, strict=True)))


def fit(rows: Floats, seconds: Floats) -> Fit:
    """The parts of which ``seconds`` [observations] consist, by the amounts in ``rows``
    [observations, parts]. Raises ``FitError`` when they do not tell the parts apart.
    """
    if rows.ndim < 2:
        raise FitError("nothing was observed")
    count, parts = rows.shape
    scale = np.abs(rows).max(axis=0, initial=0.0)
    rank = np.linalg.matrix_rank(rows / np.where(scale > 0, scale, 1.0)) if count else 0
    if count <= parts or rank < parts:
        raise FitError(f"{count} different observations do not tell {parts} parts apart")
    values = _robust(rows, seconds)
    free, errors = _free_fit(rows, seconds)
    reach = WIDENED * _t95(count - parts) * errors
    found = []
    for value, unbounded, width in zip(values, free, reach, strict=True):
        high = value + width if value > 0 else max(0.0, unbounded + width)
        found.append(Estimate(float(value), float(max(0.0, value - width)), float(high)))
    return Fit(tuple(found), _error(rows, seconds))


def non_negative(rows: Floats, seconds: Floats) -> Floats:
    """Least squares with no part below zero (Lawson and Hanson 1974, ch. 23)."""
    parts = rows.shape[1]
    scale = np.linalg.norm(rows, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = rows / scale
    values = np.zeros(parts)
    is_free = np.zeros(parts, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(seconds).max(initial=0.0)))
    for _ in range(10 * parts):
        gain = scaled.T @ (seconds - scaled @ values)
        gain[is_free] = -np.inf
        best = int(np.argmax(gain))
        if is_free.all() or gain[best] <= tolerance:
            break
        is_free[best] = True
        while True:
            trial = np.zeros(parts)
            trial[is_free] = np.linalg.lstsq(scaled[:, is_free], seconds, rcond=None)[0]
            if (trial[is_free] > 0).all():
                values = trial
                break
            # Go towards the trial until the first part is zero, and leave that one there
            falling = is_free & (trial <= 0)
            steps = values[falling] / np.maximum(values[falling] - trial[falling], 1e-300)
            values = values + float(steps.min()) * (trial - values)
            is_free &= values > 1e-14
            values[~is_free] = 0.0
            if not is_free.any():
                break
    found: Floats = values / scale
    return found


def _robust(rows: Floats, seconds: Floats) -> Floats:
    """The parts, none below zero, with outliers counted less."""
    weights = 1.0 / (seconds + JITTER_S)
    values = non_negative(rows * weights[:, None], seconds * weights)
    for _ in range(ROUNDS):
        residuals = (seconds - rows @ values) * weights
        root = np.sqrt(_huber_weights(residuals)) * weights
        fresh = non_negative(rows * root[:, None], seconds * root)
        if np.allclose(fresh, values, rtol=1e-6, atol=0):
            break
        values = fresh
    return values


def _free_fit(rows: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """(parts that may be negative, their standard errors)."""
    weights = 1.0 / (seconds + JITTER_S)
    scale = np.linalg.norm(rows * weights[:, None], axis=0)
    weighted, target = rows * weights[:, None] / scale, seconds * weights
    values = np.linalg.lstsq(weighted, target, rcond=None)[0]
    for _ in range(ROUNDS):
        root = np.sqrt(_huber_weights(target - weighted @ values))
        values = np.linalg.lstsq(weighted * root[:, None], target * root, rcond=None)[0]
    count, parts = rows.shape
    residuals = target - weighted @ values
    limit = HUBER_LIMIT * _spread(residuals)
    bounded = np.clip(residuals, -limit, limit)
    share = max(0.5, float((np.abs(residuals) <= limit).mean()))
    variance = float((bounded**2).sum()) / (count - parts) / share**2
    covariance = np.linalg.pinv(weighted.T @ weighted) * variance
    return values / scale, np.sqrt(np.diag(covariance)) / scale


def _error(rows: Floats, seconds: Floats) -> float:
    """Median relative error, every observation left out once."""
    count, parts = rows.shape
    folds = min(FOLDS, count)
    errors: list[float] = []
    for fold in range(folds):
        is_left_out = np.arange(count) % folds == fold
        if count - is_left_out.sum() < parts:
            continue
        values = _robust(rows[~is_left_out], seconds[~is_left_out])
        predicted = rows[is_left_out] @ values
        errors += (np.abs(predicted / seconds[is_left_out] - 1)).tolist()
    return float(np.median(errors)) if errors else 0.0


def _huber_weights(residuals: Floats) -> Floats:
    limit = HUBER_LIMIT * _spread(residuals)
    weights: Floats = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
    return weights


def _spread(residuals: Floats) -> float:
    """Standard deviation, as the median of their sizes has it."""
    return max(1.4826 * float(np.median(np.abs(residuals))), 1e-9)


def _t95(freedom: int) -> float:
    """The 97.5 % point of Student's t, by its expansion around the normal one (Abramowitz and
    Stegun 26.7.5); exact for one and two degrees of freedom.
    """
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (n + 1) for n, term in enumerate(terms))
