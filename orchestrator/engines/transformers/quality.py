"""What a codec costs in quality: a model's predictions behind a cached beginning, with and without
it.

A text is cut into windows. Of each window all chunks but the last are computed once, and their KV
is taken as the engine's pages would hold it; then the model predicts every token of the last chunk
behind that KV, and behind what is left of it when it has been coded and decoded. Both ways are the
same computation but for the numbers, so what differs is the codec's doing: KL divergence of the
predictions (in nats) and how often the likeliest token is the same.

What it does not know: long answers, in which differences add up, and prompts longer than a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.kernels.quantise import NUMBERS, read_numbers, write_numbers
from splitserve.kv_transfer.cache.chunk_format import PAGE_BYTES
from splitserve.kv_transfer.cache.codecs.base import LayerShape, decode_layer, encode_layer
from splitserve.kv_transfer.cache.codecs.registry import codec_named
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES
from splitserve.orchestrator.engines.transformers.findings import CodecQuality

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from splitserve.kv_transfer.cache.codecs.base import Bytes

    Coder = Callable[[Bytes, LayerShape, bool], tuple[Bytes, int]]
    """What comes back of a layer's rows, in a prompt's first chunk or another, and its size."""

WINDOW_CHUNKS = 4


class QualityError(Exception):
    """It cannot be measured: says why and what to do."""


@dataclass(frozen=True)
class KvKind:
    """Chunks of the cluster."""

    chunk_tokens: int
    number: str
    """One of ``NUMBERS``: what the engine's pages hold."""


def codec_coder(name: str) -> Coder:
    """The codec of that name, there and back."""
    codec = codec_named(name)

    def coder(rows: Bytes, shape: LayerShape, begins_prompt: bool) -> tuple[Bytes, int]:
        frame = encode_layer(codec, rows, shape, begins_prompt=begins_prompt)
        out = np.empty_like(rows)
        decode_layer(codec, memoryview(frame), shape, slice(0, shape.heads), out)
        return out, len(frame)

    return coder


class QualityMeter:
    """A model and a text."""

    def __init__(self, folder: str, kind: KvKind, *, compute: str = "float32") -> None:
        """``compute``: the type of weights and activations; ``auto`` is the checkpoint's. Raises
        ``QualityError`` for a model that cannot be loaded.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._kind = kind
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            dtype = "auto" if compute == "auto" else getattr(torch, compute)
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        except (OSError, ValueError, ImportError) as error:
            raise QualityError(
                f"the model {folder} cannot be loaded with transformers: {error}"
            ) from error

    @property
    def rope_theta(self) -> float | None:
        """The base of the angles by which keys are turned; None for a model that turns none, or in
        another way than by halves of a head.
        """
        config = self._model.config
        told = getattr(config, "rope_parameters", None) or {}
        theta = told.get("rope_theta", getattr(config, "rope_theta", None))
        plain = told.get("rope_type", "default") == "default"
        whole = float(told.get("partial_rotary_factor", 1.0)) == 1.0
        return float(theta) if theta and plain and whole else None

    def chunks(self, text: str, *, tokens: int) -> tuple[LayerShape, list[list[Bytes]]]:
        """Real KV of a text: of each chunk the rows of each layer, and their shape. Raises as
        ``measure``.
        """
        import torch

        found: list[list[Bytes]] = []
        with torch.inference_mode():
            for window in self._windows(text, tokens):
                layers = self._kv_before(window)
                found += [[layer[n] for layer in layers] for n in range(len(layers[0]))]
        heads, count, _ = found[0][0].shape
        return LayerShape(heads, count, *self._items, self._kind.number), found

    def measure(
        self,
        text: str,
        coders: Mapping[str, Coder],
        *,
        tokens: int,
        on_step: Callable[[int, int], None] = lambda done, steps: None,
    ) -> list[CodecQuality]:
        """What each coder costs on the first ``tokens`` tokens of a text. ``on_step`` is told how
        many steps are done and how many there are, before the first and after each, which is one
        coder on one window. Raises ``QualityError`` for a text that is too short, and a model whose
        KV is not one of keys and values per layer and token.
        """
        import torch

        sums = {name: _Sums() for name in coders}
        windows = list(self._windows(text, tokens))
        done, steps = 0, len(windows) * len(coders)
        on_step(done, steps)
        with torch.inference_mode():
            for window in windows:
                last = window[None, -self._kind.chunk_tokens :]
                exact = self._kv_before(window)
                expected = self._predict(last, exact)
                for name, coder in coders.items():
                    found = self._predict(last, self._coded(exact, coder, sums[name]))
                    sums[name].add(expected, found)
                    done += 1
                    on_step(done, steps)
        return [each.quality(name) for name, each in sums.items()]

    def _windows(self, text: str, tokens: int) -> Iterator[Any]:
        ids = self._tokenizer(text, return_tensors="pt", verbose=False).input_ids[0][:tokens]
        size = WINDOW_CHUNKS * self._kind.chunk_tokens
        if len(ids) < size:
            raise QualityError(
                f"{len(ids)} tokens of text are used, {size} are the least (cache.chunk_tokens x "
                f"{WINDOW_CHUNKS}): give a longer text, and more --tokens"
            )
        for start in range(0, len(ids) - size + 1, size):
            yield ids[start : start + size]

    def _kv_before(self, window: Any) -> list[list[Bytes]]:
        """Of each layer the rows of each chunk but the last, as pages hold them."""
        import torch

        size = self._kind.chunk_tokens
        beginning = window[None, :-size]
        cache = self._model(beginning, use_cache=True).past_key_values
        layers = []
        for layer in getattr(cache, "layers", ()):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.shape[2] != beginning.shape[1]:
                raise QualityError(
                    "this model keeps something else than keys and values of every token in each "
                    "layer: codecs are not measured for it"
                )
            rows = torch.cat((keys[0], values[0]), dim=-1).float().numpy()
            self._items = (keys.shape[3], values.shape[3])
            layers.append(
                [
                    self._as_pages(rows[:, start : start + size])
                    for start in range(0, rows.shape[1], size)
                ]
            )
        if not layers:
            raise QualityError("this model keeps no KV that could be cached")
        return layers

    def _as_pages(self, rows: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
        number = self._kind.number
        out = np.empty((*rows.shape[:2], rows.shape[2] * NUMBERS[number]), np.uint8)
        write_numbers(np.array(rows, np.float32), number, out)
        return out

    def _coded(self, layers: list[list[Bytes]], coder: Coder, sums: _Sums) -> list[list[Bytes]]:
        found: list[list[Bytes]] = [[] for _ in layers]
        for number in range(len(layers[0])):
            frames = 0
            raw = 0
            for layer, chunks in enumerate(layers):
                rows = chunks[number]
                shape = LayerShape(rows.shape[0], rows.shape[1], *self._items, self._kind.number)
                back, size = coder(rows, shape, number == 0)
                found[layer].append(back)
                frames += size
                raw += shape.layer_bytes
            sums.raw_bytes += HEADER_BYTES + raw
            sums.coded_bytes += HEADER_BYTES + min(raw, -(-frames // PAGE_BYTES) * PAGE_BYTES)
        return found

    def _predict(self, last: Any, layers: Sequence[Sequence[Bytes]]) -> Any:
        """Log-probabilities behind each token of the last chunk: ``[tokens, vocabulary]``."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        key_items = self._items[0]
        for number, chunks in enumerate(layers):
            rows = np.concatenate([read_numbers(c, self._kind.number) for c in chunks], axis=1)
            both = torch.from_numpy(np.array(rows, np.float32)).to(self._model.dtype)[None]
            cache.update(both[..., :key_items].clone(), both[..., key_items:].clone(), number)
        logits = self._model(last, past_key_values=cache, use_cache=True).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


class _Sums:
    """Of one coder."""

    def __init__(self) -> None:
        self.raw_bytes = self.coded_bytes = 0
        self._kl: list[Any] = []
        self._same = 0

    def add(self, expected: Any, found: Any) -> None:
        """Predictions of one window."""
        self._kl.append((expected.exp() * (expected - found)).sum(dim=-1).double().numpy())
        self._same += int((expected.argmax(dim=-1) == found.argmax(dim=-1)).sum())

    def quality(self, name: str) -> CodecQuality:
        """What they say."""
        kl = np.concatenate(self._kl)
        return CodecQuality(
            name,
            max(0.0, float(kl.mean())),
            float(np.quantile(kl, 0.99)),
            self._same / len(kl),
            self.raw_bytes / self.coded_bytes,
            len(kl),
        )
