"""The codecs by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.codecs.names import CODED
from splitserve.kv_transfer.cache.codecs.planes import BF16Z
from splitserve.kv_transfer.cache.codecs.quantised import INT5Z, INT8

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.codecs.base import Codec

_ALL: tuple[Codec, ...] = (BF16Z, INT8, INT5Z)
_CODECS = {codec.name: codec for codec in _ALL}
assert tuple(_CODECS) == CODED


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises ``ValueError`` that lists the known ones."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"unknown codec {name!r}; known: {', '.join(_CODECS)}") from None
