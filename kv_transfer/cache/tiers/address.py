"""URLs and options of tiers: variables in them, what they may be, and how they are shown."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from splitserve.kv_transfer.cache.tiers.base import TierConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.settings import TierSettings

_VARIABLE = re.compile(r"\$\{(\w+)\}")

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


def expand(text: str, where: str) -> str:
    """``text`` with each ``${NAME}`` replaced by that environment variable.

    Raises ``TierConfigError`` for one that is not set.
    """

    def value(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in os.environ:
            raise TierConfigError(
                f"{where}: the environment variable {name} is not set; export it before "
                "`splitserve up`"
            )
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def split_url(settings: TierSettings, schemes: Sequence[str]) -> SplitResult:
    """The parts of a tier's URL, as written: variables in them are not replaced yet, for what they
    hold may contain any character. Raises ``TierConfigError`` when its scheme is another one.
    """
    known = ", ".join(f"{scheme}://" for scheme in schemes)
    if not settings.url:
        raise TierConfigError(f"the {settings.type} tier needs a url ({known})")
    try:
        parts = urlsplit(settings.url)
        _ = parts.port
    except ValueError as error:
        shown = without_userinfo(settings.url)
        raise TierConfigError(f"the {settings.type} tier's url {shown!r}: {error}") from None
    if parts.scheme not in schemes:
        raise TierConfigError(
            f"the {settings.type} tier's url {without_userinfo(settings.url)!r} "
            f"has the scheme {parts.scheme!r}; known are {known}"
        )
    return parts


def without_userinfo(url: str) -> str:
    """The URL as it may be shown: no name and no password."""
    return re.sub(r"//[^/?#]*@", "//", url)


def read_options(settings: TierSettings, kind: type[OptionsT]) -> OptionsT:
    """A tier's options with variables replaced.

    Raises ``TierConfigError`` for unknown ones and for values that they cannot have, without saying
    the value: it may be a secret.
    """
    where = f"options of the {settings.type} tier"
    known = ", ".join(kind.__struct_fields__)
    values = {name: expand(value, f"{where}, {name}") for name, value in settings.options.items()}
    for name in values:
        if name not in kind.__struct_fields__:
            raise TierConfigError(f"{where}: {name!r} is unknown; known are {known}")
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise TierConfigError(f"{where}: {error}; known are {known}") from None
