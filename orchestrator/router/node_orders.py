"""What operators order about nodes: ``/internal/nodes/NAME/drain``, ``.../flip`` and
``.../forget``. The core decides; its verdict is the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

import msgspec

from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.core.effects import AnswerDrain, AnswerFlip, AnswerForget
    from splitserve.orchestrator.router.core_driver import CoreDriver

    Answer = Callable[[int, dict[str, str]], None]
    """Takes an HTTP status and a body; called once."""

Body = TypeVar("Body", bound="DrainBody | FlipBody | ForgetBody")

NODES_PATH = "/internal/nodes/"
DRAIN_LIMIT_S = 7 * 24 * 3600.0
"""Longest deadline of a drain."""
REFUSED = 409
STATUS: Final = {
    "draining": 202,
    "flipped": 202,
    "same_role": 200,
    "forgotten": 200,
    "unknown_node": 404,
}
"""Of the verdicts that are no refusal."""


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sends to ``/internal/nodes/NAME/drain``."""

    restart: bool = False
    force: bool = False
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=DRAIN_LIMIT_S)] | None = None


class FlipBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sends to ``/internal/nodes/NAME/flip``."""

    role: Literal["prefill", "decode"]
    force: bool = False


class ForgetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sends to ``/internal/nodes/NAME/forget``: nothing."""


class NodeOrders:
    """Hands operators' orders to the core."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver

    def handle(self, path: str, body: bytes, answer: Answer) -> None:
        """Carry out what was sent to a path that names a node. Raises ``ApiError`` 400 for a body
        that is wrong.
        """
        node, verb = _parts(path)
        if verb == "drain":
            self._drain(node, _read(body, DrainBody), answer)
        elif verb == "flip":
            self._flip(node, _read(body, FlipBody), answer)
        else:
            _read(body, ForgetBody)
            self._driver.forget(node, answer=_passed_to(answer))

    def _drain(self, node: str, wish: DrainBody, answer: Answer) -> None:
        """The node gets no new work, and leaves or restarts when it owes nothing."""
        self._driver.drain(
            node,
            restarts=wish.restart,
            is_forced=wish.force,
            timeout_s=wish.timeout_s,
            answer=_passed_to(answer),
        )

    def _flip(self, node: str, wish: FlipBody, answer: Answer) -> None:
        """The node gets new work of that role and of no other."""
        self._driver.flip(node, wish.role, is_forced=wish.force, answer=_passed_to(answer))


def _passed_to(answer: Answer) -> Callable[[AnswerDrain | AnswerFlip | AnswerForget], None]:
    """Hands the core's verdict on."""

    def answered(order: AnswerDrain | AnswerFlip | AnswerForget) -> None:
        status = STATUS.get(order.verdict, REFUSED)
        answer(status, {"verdict": order.verdict, "message": order.message})

    return answered


def ordered_node(path: str) -> str:
    """The NAME in ``/internal/nodes/NAME/drain`` and its like; empty for other paths."""
    return _parts(path)[0]


def _parts(path: str) -> tuple[str, str]:
    name, _, verb = path.removeprefix(NODES_PATH).rpartition("/")
    is_order = path.startswith(NODES_PATH) and verb in ("drain", "flip", "forget")
    return (name, verb) if is_order else ("", "")


def _read(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, str(error)) from error
