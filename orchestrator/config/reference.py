"""The configuration reference, written from the model classes so that it cannot say anything else
than they do.
"""

from __future__ import annotations

import types
import typing
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from splitserve.orchestrator.config.loading import section_of
from splitserve.orchestrator.config.schema import ClusterConfig

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

_INTRODUCTION = """\
# Configuration

A cluster is one YAML file: `splitserve up cluster.yaml`. Unknown keys, wrong types and
contradictions are refused before anything starts, with the key's path. `splitserve up
cluster.yaml --dry-run` prints the resolved result and the engines' command lines; `splitserve
doctor cluster.yaml` checks it against this machine.

Durations are in seconds and end in `_s`. Sizes are in bytes and end in `_bytes`; they may be
written with a unit (`1 GB`, `512 MiB`). Only `model.path` is required. A port of 0 takes a free
one at start. Nothing listens beyond loopback unless a `host` says so.

This page is generated: `splitserve config reference > docs/configuration.md`.

## Example

The built-in `quickstart` (`splitserve config show quickstart`):

```yaml
"""


def reference() -> str:
    """The page ``docs/configuration.md``."""
    example = (resources.files("splitserve.configs") / "quickstart.yaml").read_text()
    parts = [f"{_INTRODUCTION}{example}```\n", _section("", ClusterConfig)]
    seen: set[type[BaseModel]] = set()
    for path, section in _sections("", ClusterConfig):
        if section in seen:
            continue
        seen.add(section)
        parts.append(_section(path, section))
    return "\n".join(parts)


def _sections(prefix: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section below ``section``, depth first, with the path of its first use."""
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            path = f"{prefix}{name}"
            yield path, below
            yield from _sections(f"{path}.", below)


def _section(path: str, section: type[BaseModel]) -> str:
    title = f"`{path}`" if path else "Top level"
    if path == "prefill" or path.startswith("prefill."):
        title += f" and `{path.replace('prefill', 'decode', 1)}`"
    lines = [f"## {title}", "", _one_line(section.__doc__), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        cells = [f"`{name}`", _type(field), _default(field), _one_line(field.description)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation) + _bounds(field.metadata)


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(item) for item in arguments if item is not types.NoneType)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of text to {_type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}[annotation]


def _bounds(metadata: list[Any]) -> str:
    texts = []
    for item in metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            value = getattr(item, name, None)
            if value is not None:
                texts.append(f"{sign} {value:g}")
    return f" ({', '.join(texts)})" if texts else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`"
