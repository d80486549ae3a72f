"""The Secrets that manifests name, for whoever has to make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.kubernetes.options import Manifest


def wanted_secrets(files: dict[str, list[Manifest]]) -> dict[str, list[str]]:
    """Keys that have to be in each Secret, by its name; keys that may be left out are not named."""
    found: dict[str, set[str]] = {}
    for manifests in files.values():
        texts = [m.get("data", {}) for m in manifests if m["kind"] == "ConfigMap"]
        for text in (text for data in texts for text in data.values()):
            _from_text(text, manifests[0]["metadata"]["labels"], found)
        for part in _parts(manifests):
            reference = part.get("secretKeyRef")
            if isinstance(reference, dict) and not reference.get("optional"):
                found.setdefault(reference["name"], set()).add(reference["key"])
            secret = part.get("secret")
            if isinstance(secret, dict) and "items" in secret:
                keys = {item["key"] for item in secret["items"]}
                found.setdefault(secret["secretName"], set()).update(keys)
    return {name: sorted(keys) for name, keys in sorted(found.items())}


def _from_text(text: str, labels: dict[str, str], found: dict[str, set[str]]) -> None:
    """Files of the mounted Secrets that the cluster YAML names."""
    cluster = labels["app.kubernetes.io/instance"]
    for folder in ("secret", "tls"):
        for line in text.splitlines():
            _, is_there, file = line.partition(f": /etc/splitserve/{folder}/")
            if is_there:
                found.setdefault(f"{cluster}-{folder}", set()).add(file.strip())


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
