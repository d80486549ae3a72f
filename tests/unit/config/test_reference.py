"""docs/configuration.md says what the model classes say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.config.fields import Section
from splitserve.orchestrator.config.reference import reference

if TYPE_CHECKING:
    from pydantic import BaseModel

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_the_generated_one() -> None:
    """After a change of the classes: `splitserve config reference > docs/configuration.md`."""
    assert PAGE.read_text() == reference()


def test_every_key_is_explained() -> None:
    """Each field of each section has a docstring, and durations and sizes carry their unit."""
    sections: list[type[BaseModel]] = Section.__subclasses__()
    assert len(sections) >= 12
    for section in sections:
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"
