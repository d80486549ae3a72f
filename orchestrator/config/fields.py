"""What the sections of the cluster YAML are made of: their base class, and types of values with
units and bounds.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*$")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "k": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(value: object) -> object:
    """A number of bytes from ``"1 GiB"``, ``"500MB"`` or an integer; anything else is returned as
    it is, for pydantic to refuse.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(
            f"{value!r} is no size; write bytes (1000000000) or a unit (1 GB, 512 MiB)"
        )
    prefix = match[2].removesuffix("B")
    factor = _BINARY_UNITS[prefix[0]] if prefix.endswith("i") and len(prefix) == 2 else None
    if factor is None:
        if prefix not in _UNITS:
            raise ValueError(f"{value!r} has an unknown unit; use kB, MB, GB, KiB, MiB or GiB")
        factor = _UNITS[prefix]
    try:
        return int(float(match[1]) * factor)
    except OverflowError:
        raise ValueError(f"{value[:20]!r}... is larger than any memory") from None


HOLDS_SECRET = "holds_secret"
"""Kind of an error whose value is not shown, since a part of it may be a secret."""

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Host = Annotated[str, Field(min_length=1)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Cpu = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: strict, closed and frozen; fields are documented by the docstring
    below them.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )
