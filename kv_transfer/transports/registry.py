"""Transports by name, imported late: a node loads only the libraries of the one it uses.

``nixl`` and ``ucx`` bring different builds of the same native library and must not meet in a
process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from splitserve.kv_transfer.transports.base import Transport, TransportError

if TYPE_CHECKING:
    from splitserve.kv_transfer.transports.settings import TransportSettings

_CLASSES = {
    "nixl": ("splitserve.kv_transfer.transports.nixl", "NixlTransport"),
    "local": ("splitserve.kv_transfer.transports.local", "LocalTransport"),
    "tcp": ("splitserve.kv_transfer.transports.tcp", "TcpTransport"),
    "ucx": ("splitserve.kv_transfer.transports.ucx", "UcxTransport"),
}

TRANSPORTS = tuple(_CLASSES)
"""Names that ``create`` knows."""


def create(name: str, settings: TransportSettings) -> Transport:
    """A transport of that name, not yet registered.

    Raises ``TransportError`` for an unknown name and for one whose library is missing.
    """
    if name not in _CLASSES:
        raise TransportError(f"unknown transport {name!r}; known are {', '.join(TRANSPORTS)}")
    module, class_name = _CLASSES[name]
    return cast("Transport", getattr(import_module(module), class_name)(settings))
