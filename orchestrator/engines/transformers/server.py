"""``python -m splitserve.orchestrator.engines.transformers.server``: a model of Hugging Face
transformers as an engine, with vLLM's flags and HTTP surface.

It takes any small model from its folder to its first answer in seconds, for nothing is compiled,
and its KV is vLLM's: the two engines send each other prompts and share a cache. ``VLLM_API_KEY`` is
the key that it asks for, ``SPLITSERVE_SECRET`` the cluster secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
import uvloop

from splitserve.orchestrator.engines.hardware import of_processor
from splitserve.orchestrator.engines.serving.api import EngineApi
from splitserve.orchestrator.engines.serving.connector import EngineFacts
from splitserve.orchestrator.engines.serving.protocol import ApiError
from splitserve.orchestrator.engines.serving.server import (
    Parts,
    blocks_of,
    connector_of,
    scheduler_of,
    serve,
    served,
)
from splitserve.orchestrator.engines.transformers.attention import PagedAttention
from splitserve.orchestrator.engines.transformers.engine import TransformersEngine
from splitserve.orchestrator.engines.transformers.fingerprint import engine_fingerprint
from splitserve.orchestrator.engines.transformers.flags import arguments
from splitserve.orchestrator.engines.transformers.front import TransformersFront
from splitserve.orchestrator.engines.transformers.loading import (
    load_model,
    load_text,
    page_isa,
    read_generation,
    read_shape,
)
from splitserve.orchestrator.engines.transformers.memory import TorchMemory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from aiohttp import web

logger = logging.getLogger("splitserve.transformers")

ABSENT_ENDPOINTS = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/audio/transcriptions")


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(name)s: %(message)s"
    )
    transformers.utils.logging.disable_progress_bar()
    return uvloop.run(serve(arguments().parse_args(argv), build, logger))


def build(options: argparse.Namespace) -> Parts:
    """The engine of these options, its model loaded. Raises ``ValueError`` with what to change."""
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    folder = Path(options.model)
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    shape = read_shape(folder, options.dtype)
    longest = options.max_model_len or shape.longest
    if longest > shape.longest:
        raise ValueError(
            f"max_model_len {longest} is more than the {shape.longest} tokens of the model"
        )
    isa = page_isa(shape, options.block_size, device)
    kv_shape = shape.kv_shape(options.block_size, isa)
    blocks = blocks_of(options, kv_shape.block_bytes, longest)
    memory = TorchMemory(kv_shape, blocks, device)
    attention = PagedAttention(memory)
    begun = time.monotonic()
    model = load_model(folder, shape, device)
    logger.info("Loading weights took %.2f seconds", time.monotonic() - begun)
    logger.info("KV cache size: %d blocks of %d tokens, order %s", blocks, options.block_size, isa)
    facts = EngineFacts(
        engine=f"transformers {transformers.__version__}",
        hardware=of_processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        fingerprint=engine_fingerprint(
            folder, shape, block_tokens=options.block_size, isa=isa, device=device
        ),
        vocabulary_tokens=shape.vocabulary_tokens,
        max_model_len=longest,
        prefix_caching=options.enable_prefix_caching,
        step_limit_tokens=options.max_num_batched_tokens,
        running_limit_requests=options.max_num_seqs,
    )
    connector = connector_of(options, [memory], facts)
    scheduler = scheduler_of(options, connector, facts, blocks)
    engine = TransformersEngine(model, memory, attention, scheduler, connector)
    generation = read_generation(model)
    front = TransformersFront(
        load_text(folder),
        defaults=generation.defaults,
        end_ids=generation.end_ids,
        vocabulary_tokens=shape.vocabulary_tokens,
    )
    return Parts(engine, connector, TransformersApi(engine, front, served(options, facts)))


class TransformersApi(EngineApi):
    """The routes, and words for those of vLLM that are not there."""

    reads_in_thread = True

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = super().application()
        for path in ABSENT_ENDPOINTS:
            app.router.add_post(path, _absent)
        return app


async def _absent(request: web.Request) -> web.Response:
    raise ApiError(
        400,
        f"the transformers engine has no {request.path}; use /v1/chat/completions or "
        "/v1/completions, or serve with engine: vllm",
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
