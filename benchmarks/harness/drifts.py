"""Requests whose lengths drift as a recorded service's did, and what a controller makes of them in
virtual time.

A *drift* is a run of the trace's 6-hour windows, each of which passes in ``window_s``. Between the
middles of two windows the means and the spreads of prompts and answers change in a straight line (a
geometric one, since they change by factors). Lengths are lognormal. Arrivals are Poisson, at the
rate at which the work of the present mix is ``demand`` of the nodes' time, prompts and answers
together: the trace's own rates would leave the nodes idle in one window and hopeless in the next.
"""

from __future__ import annotations

import bisect
import csv
import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.capacity import Assumptions, ClosedForm, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
