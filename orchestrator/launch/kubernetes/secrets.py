"""The Secrets that manifests name, for whoever has to make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.kubernetes.options import Manifest


def wanted_secrets(files: dict[str, list[Manifest]]) -> dict[str, list[str]]:
    """Keys that have to be in each Secret, by its name; keys that may be left out are not named."""
    found: dict[str, set[str]] = {}
    for part in _parts(list(files.values())):
        reference = part.get("secretKeyRef")
        if isinstance(reference, dict) and not reference.get("optional"):
            found.setdefault(reference["name"], set()).add(reference["key"])
        secret = part.get("secret")
        if isinstance(secret, dict) and "secretName" in secret:
            keys = {item["key"] for item in secret["items"]}
            found.setdefault(secret["secretName"], set()).update(keys)
    return {name: sorted(keys) for name, keys in sorted(found.items())}


def _parts(value: Any) -> list[dict[str, Any]]:
    """Every mapping in ``value``."""
    parts, stack = [], [value]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            parts.append(current)
            stack += current.values()
        elif isinstance(current, list):
            stack += current
    return parts
