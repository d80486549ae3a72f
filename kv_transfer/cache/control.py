"""placeholder"""

from __future__ import annotations

from typing import Any


class Control:
    def __init__(self, book: Any) -> None: ...
    def handle(self, client: int, message: Any, now: float) -> list[Any]:
        return []

    def cleared(self, clear_id: int, chunks: int) -> list[Any]:
        return []
