"""Changes single values in the text of a cluster YAML and leaves everything else as it was written,
comments and layout included.

A change is made in the text at the place where the parser found the value, and what comes out is
parsed again: it is right only if exactly the wanted values differ. Where YAML's own means of saying
things once (anchors, merged keys) stand in the way, that check fails and nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from splitserve.orchestrator.config.errors import ConfigError
from splitserve.orchestrator.config.loading import parse

if TYPE_CHECKING:
    from collections.abc import Mapping


INDENT = "  "


class EditError(Exception):
    """The text cannot be changed like this; the message says why."""


def with_values(text: str, values: Mapping[str, int], source: str) -> str:
    """The text with whole numbers at dotted keys (``prefill.replicas``) set. Raises ``EditError``
    when the result would not be a cluster that differs in just these.
    """
    wanted: dict[str, Any] = parse(text, source).model_dump()
    for key, value in values.items():
        *sections, last = key.split(".")
        section = wanted
        for name in sections:
            section = section[name]
        section[last] = value
    changed = text
    for key, value in values.items():
        changed = _with_value(changed, key.split("."), value, source)
    try:
        found = parse(changed, source)
    except ConfigError as error:
        raise EditError(f"{source}: {'; '.join(error.problems)}") from error
    if found.model_dump() != wanted:
        raise EditError(
            f"{source}: changing {', '.join(values)} would change other values too, which are "
            "written with the same anchor; change it by hand"
        )
    return changed


def _with_value(text: str, path: list[str], value: int, source: str) -> str:
    """The text with one value set; it may have side effects, which the caller finds."""
    tree: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, name in enumerate(path):
        if not isinstance(tree, yaml.MappingNode):
            raise EditError(f"{source}: {'.'.join(path[:depth])} is no section with keys")
        pair = next(((key, node) for key, node in tree.value if key.value == name), None)
        if pair is None:
            return _with_new_key(text, tree, path[depth:], value)
        tree = pair[1]
    assert tree is not None
    return text[: tree.start_mark.index] + str(value) + text[tree.end_mark.index :]


def _with_new_key(text: str, section: yaml.MappingNode, path: list[str], value: int) -> str:
    """The text with a key, or a section with it, as the first of ``section``."""
    start = section.start_mark
    if section.flow_style:
        inner = "".join(f"{{{name}: " for name in path[1:])
        entry = f"{path[0]}: {inner}{value}{'}' * (len(path) - 1)}"
        rest = ", " if section.value else ""
        # The mapping begins with its brace, perhaps behind an anchor
        brace = text.index("{", start.index)
        return f"{text[: brace + 1]}{entry}{rest}{text[brace + 1 :]}"
    margin = " " * section.value[0][0].start_mark.column
    lines = [f"{margin}{INDENT * depth}{name}:" for depth, name in enumerate(path)]
    entry = "\n".join(lines) + f" {value}\n"
    if len(path) > 1:
        # A new section goes to the end, behind everything that was written
        at = section.value[-1][1].end_mark.index
        end = text.find("\n", max(at - 1, 0))
        before = text if end < 0 else text[: end + 1]
        joint = "" if before.endswith("\n") else "\n"
        return before + joint + entry + text[len(before) :]
    first = section.value[0][0].start_mark
    begin = first.index - first.column
    return text[:begin] + entry + text[begin:]
