"""Marks on their way through an engine: from a leg to positions, and to what the engine reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from splitserve.kv_transfer.cache.engine_cache import PromptIdentity
from splitserve.kv_transfer.engine_endpoint import EngineDescription
from splitserve.kv_transfer.held_prefixes import NOTHING_HELD
from splitserve.kv_transfer.prefix_marks import split_digests
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines import legs as subject
from splitserve.orchestrator.engines.legs import EngineLoad, Legs

SECRET = bytes(range(32))
MARKS = [b"mark   1", b"mark   2", b"mark   3"]
HASHES = [b"block %d" % number for number in range(20)]
PROMPT = range(200)
"""Of 1,600 bytes: its marks lie behind 64, 128 and 192 tokens."""


@dataclass
class Rig:
    """Legs of an engine with blocks of 16 tokens; nothing listens."""

    cached: set[bytes] = field(default_factory=lambda: set(HASHES))
    has_cache: bool = True

    def __post_init__(self) -> None:
        description = EngineDescription(
            incarnation="e",
            fingerprint={},
            control_addresses=(),
            block_tokens=16,
            total_blocks=100,
            max_model_len=1_000,
            tensor_parallel=1,
            transport="tcp",
        )
        self.legs = Legs(
            SECRET,
            "tcp://127.0.0.1:1",
            description,
            lambda: EngineLoad(0, 0, 100),
            self.cached.__contains__ if self.has_cache else None,
        )

    def arrive(
        self,
        request_id: str,
        role: Literal["prefill", "decode", "alone"] = "alone",
        secret: bytes = SECRET,
        **changes: Any,
    ) -> None:
        """A leg of that prompt reaches the scheduler."""
        fields = {"marks": b"".join(MARKS), "prompt_bytes": 1_600} | changes
        params = TransferParams(transfer_id=request_id, role=role, peer_incarnation="p", **fields)
        self.legs.arrived(request_id, seal(params, secret), PROMPT, PromptIdentity())

    def finish(self, request_id: str) -> None:
        """The request's prompt was computed."""
        blocks = lambda: HASHES[: len(PROMPT) // 16]  # noqa: E731
        self.legs.finished(request_id, aborted=False, blocks=13, block_hashes=blocks)

    def reported(self) -> list[bytes]:
        """Marks that come in the next report."""
        return split_digests(self.legs._prefixes(False).added)


def test_every_kind_of_leg_brings_its_marks() -> None:
    """As positions in the tokens, until the request is finished."""
    rig = Rig()
    for role in ("prefill", "decode", "alone"):
        rig.arrive(role, role)  # type: ignore[arg-type]
        assert rig.legs.marks_of(role) == tuple(zip(MARKS, (64, 128, 192), strict=True))
        rig.finish(role)
        assert rig.legs.marks_of(role) == ()


def test_marks_are_those_of_the_prompt_without_an_answers_beginning() -> None:
    """40 of the 200 tokens are the answer's: the marks share the other 160."""
    rig = Rig()
    rig.arrive("r", resumed_tokens=40)
    assert [tokens for _, tokens in rig.legs.marks_of("r")] == [51, 102, 153]


def test_marks_that_this_cluster_has_not_made_are_ignored() -> None:
    """As all parameters without its seal are; so is a length that cannot be."""
    rig = Rig()
    rig.arrive("r", secret=bytes(32))
    rig.arrive("s", prompt_bytes=1_000)
    rig.arrive("t", marks=b"")
    assert [rig.legs.marks_of(name) for name in "rst"] == [(), (), ()]


def test_a_finished_request_is_reported_as_far_as_its_blocks_are_cached() -> None:
    """The third mark ends in block 12, of which 8 of 16 tokens are there."""
    rig = Rig()
    rig.arrive("r")
    assert rig.reported() == []
    rig.finish("r")
    assert rig.reported() == MARKS
    rig.cached.remove(HASHES[11])
    assert split_digests(rig.legs._prefixes(False).removed) == [MARKS[2]]


def test_an_engine_without_a_prefix_cache_reports_nothing() -> None:
    """And does not ask for the hashes of its blocks."""
    rig = Rig(has_cache=False)
    rig.arrive("r")
    rig.legs.finished("r", aborted=False, blocks=1, block_hashes=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert rig.legs._prefixes(True) == NOTHING_HELD


def test_marks_of_a_bounded_number_of_requests_are_kept() -> None:
    """Of more, those of the oldest are forgotten; so are finished ones that nobody asks about."""
    rig = Rig()
    for number in range(subject.MARKED_LIMIT_REQUESTS + 1):
        rig.arrive(str(number))
    assert rig.legs.marks_of("0") == ()
    assert rig.legs.marks_of("1") != ()
    for number in range(subject.UNREAD_LIMIT_REQUESTS + 2):
        rig.finish(str(number))
    assert len(rig.legs._finished) == subject.UNREAD_LIMIT_REQUESTS
