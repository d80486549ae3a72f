"""What weights are, whatever they are called and wherever they lie."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE_BYTES = 1 << 20
CONFIG_FILES = ("config.json", "adapter_config.json")


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
