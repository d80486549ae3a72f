"""What weights and tokenizers are, whatever they are called and wherever they lie."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SAMPLE_BYTES = 1 << 20
CONFIG_FILES = ("config.json", "adapter_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def weights_identity(folder: Path, revision: str | None) -> str:
    """Content of a local checkpoint or adapter by size and samples of each file; where there are no
    files, its name (a Hub id) with the revision.
    """
    files = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt"))
    if not files:
        return f"{folder}@{revision}"
    digest = blake2b(digest_size=16)
    configs = [path for name in CONFIG_FILES if (path := folder / name).is_file()]
    for path in [*files, *configs]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for offset in range(0, size, max(SAMPLE_BYTES, size // 8)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_identity(folder: Path, revision: str | None) -> str:
    """Content of a local folder's tokenizer and chat template, or a Hub id with the revision."""
    digest = blake2b(digest_size=16)
    found = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
    if not found:
        return f"{folder}@{revision}"
    for path in found:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def layers_identity(names: Iterable[str]) -> str:
    """The attention layers of a model, by their names in vLLM."""
    return blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
