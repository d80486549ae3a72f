"""How a bug is planted: one method of the real code is replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Plant = Callable[[pytest.MonkeyPatch], None]


def method(owner: type, name: str, replacement: Any) -> Plant:
    """A bug that replaces one method; ``replacement`` gets the real one first."""
    real = getattr(owner, name)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, lambda self, *a, **k: replacement(real, self, *a, **k))

    return plant


def no_effects_of(kind: type) -> Any:
    """A replacement that loses effects."""

    def replacement(real: Any, owner: Any, *arguments: Any, **named: Any) -> Any:
        return [e for e in real(owner, *arguments, **named) if not isinstance(e, kind)]

    return replacement


def never(real: Any, *arguments: Any, **named: Any) -> list[Any]:
    """A replacement that does nothing."""
    return []


def is_false(real: Any, *arguments: Any, **named: Any) -> bool:
    """A replacement that always says no."""
    return False
