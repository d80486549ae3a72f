"""``python -m splitserve.orchestrator.engines.mock.server``: an engine without a model, with vLLM's
flags and HTTP surface.

It moves real bytes through the product's own transfer threads, and its answers depend on every byte
of KV (see ``model``), so a test that runs it in a split learns whether each page arrived where it
belongs. It needs neither torch nor vLLM and is ready in about a second. ``VLLM_API_KEY`` is the key
it asks for, ``SPLITSERVE_SECRET`` the cluster secret.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from splitserve.orchestrator.engines.hardware import of_processor
from splitserve.orchestrator.engines.mock.api import MockApi
from splitserve.orchestrator.engines.mock.engine import MockEngine
from splitserve.orchestrator.engines.mock.faults import FaultBox, initial_faults
from splitserve.orchestrator.engines.mock.front import MockFront
from splitserve.orchestrator.engines.mock.model import WORD_BYTES, KvMemory, KvShape, MockModel
from splitserve.orchestrator.engines.mock.timing import profile_timing, simple_timing
from splitserve.orchestrator.engines.mock.tokenizer import VOCABULARY
from splitserve.orchestrator.engines.serving.connector import EngineFacts
from splitserve.orchestrator.engines.serving.server import (
    Parts,
    blocks_of,
    common_flags,
    connector_of,
    scheduler_of,
    serve,
    served,
)
from splitserve.orchestrator.tuner.profile import parse_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.engines.mock.timing import Timing

logger = logging.getLogger("splitserve.mock")

ENGINE = "mock 1"


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(name)s: %(message)s"
    )
    return uvloop.run(serve(arguments().parse_args(argv), build, logger))


def build(options: argparse.Namespace) -> Parts:
    """The engine of these options. Raises ``ValueError`` with what to change."""
    shape = KvShape(
        layers=options.num_layers,
        heads=options.num_kv_heads,
        block_tokens=options.block_size,
        head_bytes=options.kv_head_bytes,
    )
    ranks: int = options.tensor_parallel_size
    blocks = _check(options, shape)
    memories = [
        KvMemory(shape, rank=rank, tensor_parallel=ranks, blocks=blocks) for rank in range(ranks)
    ]
    logger.info("KV cache size: %d blocks of %d tokens", blocks, shape.block_tokens)
    facts = EngineFacts(
        engine=ENGINE,
        hardware=of_processor(),
        fingerprint=fingerprint(shape, options.seed),
        vocabulary_tokens=VOCABULARY,
        max_model_len=options.max_model_len,
        prefix_caching=options.enable_prefix_caching,
        step_limit_tokens=options.max_num_batched_tokens,
        running_limit_requests=options.max_num_seqs,
    )
    connector = connector_of(options, memories, facts)
    scheduler = scheduler_of(options, connector, facts, blocks)
    faults = FaultBox(initial_faults())
    model = MockModel(shape, options.seed)
    engine = MockEngine(model, memories, scheduler, connector, faults, _timing(options))
    about = served(options, facts)
    api = MockApi(engine, MockFront(), about, faults, allow_faults=options.enable_faults)
    return Parts(engine, connector, api)


def fingerprint(shape: KvShape, seed: int) -> dict[str, str]:
    """What must be equal in two mock engines for one's KV to be usable in the other."""
    return {
        "engine": ENGINE,
        "weights": f"seed {seed}",
        "tokenizer": "bytes",
        "block_size": str(shape.block_tokens),
        "layers": str(shape.layers),
        "kv_layout": f"LBHNC, {shape.heads} heads of {shape.head_bytes} bytes",
    }


def _check(options: argparse.Namespace, shape: KvShape) -> int:
    """The number of blocks. Raises ``ValueError``."""
    ranks = options.tensor_parallel_size
    if shape.heads % ranks:
        raise ValueError(
            f"--tensor-parallel-size {ranks} does not divide --num-kv-heads {shape.heads}"
        )
    if shape.head_bytes % WORD_BYTES:
        raise ValueError(f"--kv-head-bytes must be a multiple of {WORD_BYTES}")
    page = shape.page_bytes(shape.heads // ranks)
    return blocks_of(options, page * shape.layers, options.max_model_len)


def _timing(options: argparse.Namespace) -> Timing:
    """What steps and transfers take. Raises ``ValueError``."""
    if options.profile is None:
        return simple_timing(options.seconds_per_step, options.seconds_per_prompt_token)
    if options.seconds_per_step or options.seconds_per_prompt_token:
        raise ValueError("--profile says what steps take; leave out --seconds-per-...")
    if options.speed <= 0:
        raise ValueError(f"--speed {options.speed:g} must be above 0")
    try:
        text = Path(options.profile).read_bytes()
    except OSError as error:
        raise ValueError(f"--profile {options.profile}: {error.strerror}") from error
    return profile_timing(parse_profile(text, f"--profile {options.profile}"), options.speed)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mock engine",
        description="An engine without a model: real KV pages, deterministic answers",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a name; nothing is loaded")
    common_flags(parser)
    add("--block-size", type=int, default=32, help="tokens per KV block")
    add("--kv-cache-memory-bytes", type=int, default=16 * 2**20, help="KV of each rank")
    add("--max-model-len", type=int, default=4096, help="longest prompt and answer in tokens")
    add("--max-num-seqs", type=int, default=128, help="requests computed at a time")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens per step")
    add("--tensor-parallel-size", type=int, default=1, help="transfer threads, each with its heads")
    add("--num-layers", type=int, default=4)
    add("--num-kv-heads", type=int, default=2, help="of the whole model")
    add("--kv-head-bytes", type=int, default=32, help="one head of one token in one layer")
    add("--seed", type=int, default=0, help="stands for the weights")
    add("--seconds-per-step", type=float, default=0.0, help="time that each step seems to take")
    add("--seconds-per-prompt-token", type=float, default=0.0, help="and each prompt token in it")
    add("--profile", help="JSON file of `splitserve profile`: what steps and transfers take")
    add("--speed", type=float, default=1.0, help="steps are so many times as fast as --profile")
    add("--enable-faults", action=argparse.BooleanOptionalAction, default=False,
        help="serve /mock/faults")  # fmt: skip
    return parser


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
