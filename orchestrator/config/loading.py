"""Reads a cluster YAML: by path or by the name of a built-in one. Every error names the key's path
and, where known, its line.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from splitserve.orchestrator.config.checks import problems_between_keys
from splitserve.orchestrator.config.credentials import SECRET_NAMES
from splitserve.orchestrator.config.errors import ConfigError
from splitserve.orchestrator.config.fields import HOLDS_SECRET
from splitserve.orchestrator.config.schema import ClusterConfig

_MAX_FILE_BYTES = 2**20
_LIKE_A_KEY = 0.7
"""How similar a word is to a key of ours that it may be meant for; ``modle`` has 0.8."""
_QUOTED_WORDS = re.compile(r" '[^'<\\]{2,}'")
"""Words of the file in a parser's message; signs, escapes and tokens (``'<scalar>'``) stay."""


class _Loader(yaml.SafeLoader):
    """With YAML 1.2's numbers: ``5e-4`` is one, which YAML 1.1 takes for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def builtin_names() -> list[str]:
    """Names of the configurations that come with splitserve."""
    folder = resources.files("splitserve.configs")
    return sorted(
        item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")
    )


def load(path_or_name: str | Path) -> ClusterConfig:
    """The checked configuration of a YAML file, or of a built-in one by its name (``quickstart``).

    Raises ``ConfigError`` with every problem found. Nothing of this machine is looked at: see
    ``launch.checks``.
    """
    text, source = _read(str(path_or_name))
    return parse(text, source)


def load_with_contradictions(path_or_name: str | Path) -> tuple[ClusterConfig, list[str]]:
    """As ``load``, but what several keys do not agree on is returned, so that all else can be
    looked at too. Raises ``ConfigError`` for what is no configuration at all.
    """
    text, source = _read(str(path_or_name))
    config = _validated(text, source)
    return config, problems_between_keys(config)


def parse(text: str, source: str = "<string>") -> ClusterConfig:
    """The checked configuration of a YAML text; ``source`` names it in errors."""
    config = _validated(text, source)
    problems = problems_between_keys(config)
    if problems:
        raise ConfigError(problems, source)
    return config


def _validated(text: str, source: str) -> ClusterConfig:
    """Each value fits its key; what keys must agree on is not looked at."""
    try:
        tree = yaml.compose(text, Loader=_Loader)
        _refuse_foreign(tree, source)
        _refuse_odd_keys(tree, source)
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"not readable as YAML: {_place_of(error)}"], source) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"not readable as YAML: {error}"], source) from error
    try:
        config = ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError([_sentence(item, tree) for item in error.errors()], source) from None
    try:
        ClusterConfig.model_validate_json(dump_resolved(config))
    except (ValidationError, PydanticSerializationError, ValueError) as error:
        message = f"a value cannot be handed on to the processes: {error}"
        raise ConfigError([message], source) from error
    return config


def load_resolved(path: Path) -> ClusterConfig:
    """The configuration that ``up`` wrote as JSON for the processes it starts (ports filled in)."""
    return ClusterConfig.model_validate_json(path.read_bytes())


def dump_resolved(config: ClusterConfig) -> str:
    """The JSON that ``load_resolved`` reads."""
    return config.model_dump_json(indent=1)


def _read(path_or_name: str) -> tuple[str, str]:
    path = Path(path_or_name).expanduser()
    if path.is_file():
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                [f"larger than {_MAX_FILE_BYTES} bytes; this is no cluster YAML"], str(path)
            )
        try:
            return path.read_text(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            message = f"cannot be read: {error}; a cluster YAML is text in UTF-8"
            raise ConfigError([message], str(path)) from error
    names = builtin_names()
    if path_or_name in names:
        resource = resources.files("splitserve.configs") / f"{path_or_name}.yaml"
        return resource.read_text(), f"{path_or_name} (built in)"
    if path.exists():
        kind = "a folder" if path.is_dir() else "no plain file"
        raise ConfigError([f"this is {kind}; give the path of a cluster YAML"], str(path))
    close = difflib.get_close_matches(path_or_name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; give a YAML's path, or one of these"
    raise ConfigError(
        [f"no such file, and no built-in configuration of that name ({', '.join(names)}){hint}"],
        path_or_name,
    )


def _refuse_foreign(tree: yaml.Node | None, source: str) -> None:
    """Raise for a file that is something else altogether. Nothing of it is shown: it may be one
    that holds secrets.
    """
    known = list(ClusterConfig.model_fields)
    keys = tree.value if isinstance(tree, yaml.MappingNode) else []
    words = [str(key.value) for key, _ in keys if isinstance(key, yaml.ScalarNode)]
    if any(difflib.get_close_matches(word, known, 1, _LIKE_A_KEY) for word in words):
        return
    raise ConfigError(
        ["this is no cluster YAML, a mapping with at least `model:`; see docs/configuration.md"],
        source,
    )


def _place_of(error: yaml.YAMLError) -> str:
    """What is wrong with the text and where, without the text itself."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem is not None:
        mark = error.problem_mark or error.context_mark
        problem = _QUOTED_WORDS.sub("", error.problem)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        return f"{where}{problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position + 1})"
    return "its form is wrong"


def _refuse_odd_keys(tree: yaml.Node | None, source: str) -> None:
    """YAML lets the last of two equal keys win silently, and has keys that are no text; here both
    are errors, as is a part that contains itself.
    """
    stack = [tree] if tree is not None else []
    seen_nodes: set[int] = set()
    while stack:
        current = stack.pop()
        if id(current) in seen_nodes:  # An anchor that is used again: it was looked at.
            continue
        seen_nodes.add(id(current))
        if isinstance(current, yaml.SequenceNode):
            stack += current.value
        if not isinstance(current, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for key, value in current.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    [f"line {key.start_mark.line + 1}: a key must be one word"], source
                )
            if key.value in seen:
                raise ConfigError(
                    [f"line {key.start_mark.line + 1}: key {key.value!r} is given twice"], source
                )
            seen.add(key.value)
            stack.append(value)


def _sentence(item: Any, tree: yaml.Node | None) -> str:
    location = tuple(
        part for part in item["loc"] if part not in ("function-before[parse_bytes(), int]",)
    )
    line = _line(tree, location)
    where = _dotted(location) + (f" (line {line})" if line is not None else "")
    kind = item["type"]
    if kind == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{where}: unknown key; {remedy}"
    if kind == "missing":
        return f"{where}: required, but missing"
    value = item.get("input")
    if kind == HOLDS_SECRET or _may_hold_secret(location):
        value = _HIDDEN
    if kind in _REMEDIES:
        return f"{where}: {_REMEDIES[kind].format(key=location[-1])}{_got(value)}"
    if kind in ("model_type", "dict_type") and value is None:
        return f"{where}: is empty; give keys below it, or remove the line"
    if kind in ("model_type", "dict_type"):
        return f"{where}: a section with keys{_as_section(location, value)}{_got(value)}"
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{where}: {message}{_got(value)}"


_HIDDEN = object()
"""Stands for a value that is not shown."""
_REMEDIES = {
    "int_type": "a whole number, without quotes or unit",
    "int_from_float": "a whole number",
    "float_type": "a number, in the unit that the key's end names (`60`, not `1m`)",
    "string_type": 'text; put it in quotes: `{key}: "..."`',
    "bool_type": "true or false, without quotes",
    "list_type": "a list (of lists where each replica has its own: `[[0], [1]]`)",
}
"""What to write, by pydantic's name of the mistake."""


def _may_hold_secret(location: tuple[int | str, ...]) -> bool:
    """Whether somebody may have written a key or a token there, though none belongs there."""
    if location[1:2] == ("env",) and len(location) > 2:
        return SECRET_NAMES.search(str(location[2])) is not None
    return location[:1] == ("security",) or location[1:2] == ("env",)


def _as_section(location: tuple[int | str, ...], value: object) -> str:
    """How a single value is written as a section, where one of its keys is the likely meaning."""
    known = _known_keys(location)
    if known and value is _HIDDEN:
        return f", known are: {', '.join(known)}"
    if not known or not isinstance(value, str):
        return ""
    section = f"{{{known[0]}: {value}}}"
    if isinstance(location[-1], int):
        return f"; write `- {section}`?"
    return f"; write `{location[-1]}: {section}`?"


def _got(value: object) -> str:
    return f" (got {value!r})" if isinstance(value, str | int | float | bool | type(None)) else ""


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text or "(top level)"


def _line(tree: yaml.Node | None, location: tuple[int | str, ...]) -> int | None:
    """Line of the deepest part of ``location`` that the file has."""
    line: int | None = None
    for part in location:
        if isinstance(tree, yaml.MappingNode):
            found = [(key, value) for key, value in tree.value if key.value == part]
            if not found:
                break
            line, tree = found[0][0].start_mark.line + 1, found[0][1]
        elif (
            isinstance(tree, yaml.SequenceNode) and isinstance(part, int) and part < len(tree.value)
        ):
            tree = tree.value[part]
            line = tree.start_mark.line + 1
        else:
            break
    return line


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at ``location``."""
    section: type[BaseModel] = ClusterConfig
    for part in location:
        if isinstance(part, int):
            continue
        found = section_of(section.model_fields[part].annotation)
        if found is None:
            return []
        section = found
    return list(section.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside a field's type (``X``, ``list[X]``, ``X | None``), None for a plain
    value.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType | types.GenericAlias) or typing.get_origin(
        annotation
    ):
        for argument in typing.get_args(annotation):
            if (found := section_of(argument)) is not None:
                return found
    return None
