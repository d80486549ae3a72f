"""Joining what the ranks of one engine report."""

from __future__ import annotations

from splitserve.kv_transfer.orders import TransferResults
from splitserve.orchestrator.engines.serving.connector import RankReports


def names(*found: str) -> frozenset[str]:
    return frozenset(found)


def test_a_request_is_finished_when_all_ranks_say_so() -> None:
    """In any step each; it is reported once."""
    reports = RankReports(2)
    assert reports.join([TransferResults(names("a")), TransferResults()]) == TransferResults()
    joined = reports.join([TransferResults(), TransferResults(names("a"))])
    assert joined == TransferResults(names("a"))
    assert reports.join([TransferResults(), TransferResults()]) == TransferResults()


def test_one_failed_rank_fails_the_request() -> None:
    """But it is reported only when no rank waits any more."""
    reports = RankReports(2)
    failed = TransferResults(finished_receiving=names("a"), failed_receiving=names("a"))
    assert reports.join([failed, TransferResults()]) == TransferResults()
    landed = TransferResults(finished_receiving=names("a"))
    assert reports.join([TransferResults(), landed]) == failed
