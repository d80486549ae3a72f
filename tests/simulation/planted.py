"""Protocol bugs to plant: each breaks one promise, and the seeds must find it."""

from __future__ import annotations

from simulation import planted_core, planted_transfers

DRAIN_BUGS = planted_core.DRAIN_BUGS
BUGS = {**planted_transfers.BUGS, **planted_core.BUGS}
"""By what is wrong: how to plant it, and a seed that finds it, tried first."""
