"""What can be said of a model's folder without loading it: the shape of its KV, whether its weights
are all there, whether it has a tokenizer and a chat template.

A safetensors file begins with the length of a JSON header, which names every tensor and where its
bytes end: a file that was cut off shows there.
Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from splitserve.orchestrator.models.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ITEM_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "*.tiktoken",
    "tokenization_*.py",
)
"""Patterns; any of them may be enough."""
TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json")
"""An engine does not start when one of them is there and damaged."""
DEFAULTS_JSON = ("generation_config.json",)
"""It starts without them, and their defaults."""
INDEX = "model.safetensors.index.json"
HEADER_LIMIT_BYTES = 100 * 2**20
"""The format's own limit."""
_LENGTH = struct.Struct("<Q")
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")
_KEYS = re.compile(r"^(?:model\.|language_model\.)*layers\.0\.self_attn\.k_proj\.weight$")
_PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})


class _Config(msgspec.Struct):
    num_hidden_layers: Annotated[int, Meta(ge=1)] | None = None
    num_attention_heads: Annotated[int, Meta(ge=1)] | None = None
    num_key_value_heads: Annotated[int, Meta(ge=1)] | None = None
    hidden_size: Annotated[int, Meta(ge=1)] | None = None
    head_dim: Annotated[int, Meta(ge=1)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1)] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    kv_lora_rank: int | None = None
    architectures: list[str] = []
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    num_kv_shared_layers: int | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    @property
    def has_plain_kv(self) -> bool:
        """Every layer attends to everything, with KV of its own."""
        slides = self.sliding_window is not None and self.use_sliding_window is not False
        kinds = set(self.layer_types or ["full_attention"])
        return not slides and not self.num_kv_shared_layers and kinds == {"full_attention"}

    @property
    def has_scaled_positions(self) -> bool:
        """Positions may go beyond ``max_position_embeddings``."""
        return any("factor" in (rope or {}) for rope in (self.rope_scaling, self.rope_parameters))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]
    dtype: str = ""
    shape: tuple[int, ...] = ()


class _TokenizerConfig(msgspec.Struct):
    chat_template: Any = None


@dataclass(frozen=True)
class ModelFacts:
    """What a model's ``config.json`` says; None where it does not."""

    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    max_position: int | None
    """Tokens that it was made for; None too where positions are scaled."""
    dtype: str | None
    """Of the weights, as they are stored."""
    has_latent_kv: bool
    has_plain_kv: bool = True
    """Every layer keeps keys and values of every token."""
    architectures: tuple[str, ...] = ()
    """Names of its classes, the one that fits best first."""

    def kv_bytes_per_token(self, item_bytes: int) -> int | None:
        """Keys and values of all layers and heads; None where their shape is not known."""
        if self.has_latent_kv or not self.has_plain_kv:
            return None
        if None in (self.layers, self.kv_heads, self.head_dim):
            return None
        assert self.layers is not None
        assert self.kv_heads is not None
        assert self.head_dim is not None
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes


def read_facts(folder: Path) -> ModelFacts:
    """What ``config.json`` says. Raises ``ModelError`` when it cannot be read as one."""
    path = folder / "config.json"
    try:
        outer = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        inner = outer.get("text_config")
        config = msgspec.convert(outer | inner if isinstance(inner, dict) else outer, _Config)
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors too
        raise ModelError(f"{path} cannot be read: {error}; restore the model's folder") from error
    head_dim = config.head_dim
    if head_dim is None and config.hidden_size and config.num_attention_heads:
        head_dim = config.hidden_size // config.num_attention_heads
    return ModelFacts(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        max_position=None if config.has_scaled_positions else config.max_position_embeddings,
        dtype=config.dtype or config.torch_dtype,
        has_latent_kv=bool(config.kv_lora_rank),
        has_plain_kv=config.has_plain_kv,
        architectures=tuple(config.architectures),
    )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold weights, by name; empty when the folder cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    except OSError:
        return []


def weight_bytes(folder: Path) -> int:
    """Bytes of weights on disk; of the several forms that a folder may hold, the one that engines
    prefer.
    """
    files = weight_files(folder)
    preferred = next((s for s in WEIGHT_SUFFIXES if any(f.suffix == s for f in files)), "")
    return sum(_size(path) for path in files if path.suffix == preferred)


def weight_problems(folder: Path) -> Iterator[str]:
    """What is missing or cut off, a clause each; only headers are read."""
    files = weight_files(folder)
    if not files:
        yield f"{folder} holds no weights ({', '.join('*' + s for s in WEIGHT_SUFFIXES)})"
        return
    for path in files:
        if problem := _file_problem(path):
            yield problem
    yield from _index_problems(folder)


def mismatches(folder: Path, facts: ModelFacts) -> Iterator[str]:
    """Where the weights are those of another ``config.json``, a clause each; nothing for weights
    that say too little.
    """
    tensors: dict[str, _Tensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            try:
                tensors |= _tensors(path)
            except (OSError, ValueError):
                return  # Told of the file itself.
    numbers = [int(found[1]) for name in tensors if (found := _LAYER.search(name))]
    if numbers and facts.layers and max(numbers) + 1 < facts.layers:
        yield f"the weights have {max(numbers) + 1} layers, config.json says {facts.layers}"
    if facts.kv_heads is None or facts.head_dim is None or not facts.has_plain_kv:
        return
    expected = facts.kv_heads * facts.head_dim
    for name, tensor in tensors.items():
        if _KEYS.search(name) and tensor.dtype in _PLAIN_TYPES and tensor.shape[:1] != (expected,):
            yield (
                f"{name} has {tensor.shape[0] if tensor.shape else 0} rows, config.json says "
                f"{facts.kv_heads} KV heads of {facts.head_dim}"
            )


def broken_json(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Those of the files that are there and damaged, a clause each."""
    for path in (folder / name for name in names):
        if not path.is_file():
            continue
        try:
            msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        except (OSError, ValueError) as error:
            yield f"{path} cannot be read ({error})"


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a file that a tokenizer is made from."""
    return any(next(folder.glob(pattern), None) is not None for pattern in TOKENIZER_FILES)


def has_chat_template(folder: Path) -> bool:
    """Whether chats can be turned into prompts without one being given."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        text = (folder / "tokenizer_config.json").read_bytes()
        return bool(msgspec.json.decode(text, type=_TokenizerConfig).chat_template)
    except (OSError, ValueError):
        return False


def _file_problem(path: Path) -> str:
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read by this user"
    size = _size(path)
    if path.suffix != ".safetensors":
        return "" if size else f"{path} is empty"
    try:
        needed = _needed_bytes(path)
    except (OSError, ValueError) as error:
        return f"{path} is damaged ({error})"
    if size < needed:
        return f"{path} is cut off: {size} bytes of {needed}"
    return f"{path} is damaged: {size} bytes instead of {needed}" if size > needed else ""


def _needed_bytes(path: Path) -> int:
    """How long the file has to be. Raises ``ValueError`` for what is no header."""
    _, begin = _header(path)
    ends = [tensor.data_offsets[1] for tensor in _tensors(path).values()]
    return begin + max(ends, default=0)


def _tensors(path: Path) -> dict[str, _Tensor]:
    """What a safetensors file says of its tensors. Raises ``ValueError`` for what is no header."""
    header, _ = _header(path)
    return {
        name: msgspec.convert(tensor, _Tensor)
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and where its tensors begin."""
    with path.open("rb") as file:
        begin = file.read(_LENGTH.size)
        if len(begin) < _LENGTH.size:
            raise ValueError(f"{len(begin)} bytes")
        (length,) = _LENGTH.unpack(begin)
        if length > HEADER_LIMIT_BYTES:
            raise ValueError(f"a header of {length} bytes")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends inside its header")
    return msgspec.json.decode(text, type=dict[str, Any]), _LENGTH.size + length


def _index_problems(folder: Path) -> Iterator[str]:
    path = folder / INDEX
    if not path.is_file():
        return
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, ValueError) as error:
        yield f"{path} cannot be read ({error})"
        return
    for name in sorted(set(index.weight_map.values())):
        if not (folder / name).is_file():
            yield f"{folder / name} is missing, which {INDEX} names"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
