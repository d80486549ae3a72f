"""``python -m splitserve.orchestrator.engines.mock.server``: an engine without a model, with vLLM's
flags and HTTP surface.

It moves real bytes through the product's own transfer threads, and its answers depend on every byte
of KV (see ``model``), so a test that runs it in a split learns whether each page arrived where it
belongs. It needs neither torch nor vLLM and is ready in about a second. ``VLLM_API_KEY`` is the key
it asks for, ``SPLITSERVE_SECRET`` the cluster secret.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from aiohttp import web

from splitserve.orchestrator.engines.connector_config import ConnectorConfig, cluster_secret
from splitserve.orchestrator.engines.mock.api import MockApi
from splitserve.orchestrator.engines.mock.connector import Connector, NoConnector
from splitserve.orchestrator.engines.mock.engine import MockEngine
from splitserve.orchestrator.engines.mock.faults import FaultBox, initial_faults
from splitserve.orchestrator.engines.mock.model import WORD_BYTES, KvMemory, KvShape, MockModel
from splitserve.orchestrator.engines.mock.scheduler import Scheduler
from splitserve.orchestrator.engines.mock.timing import profile_timing, simple_timing
from splitserve.orchestrator.tuner.profile import parse_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.engines.mock.timing import Timing

logger = logging.getLogger("splitserve.mock")

STOP_DEADLINE_S = 2.0
API_KEY_ENV = "VLLM_API_KEY"
"""vLLM's own variable."""


@dataclass(frozen=True)
class Parts:
    """An engine before it serves."""

    engine: MockEngine
    connector: Connector | NoConnector
    api: MockApi


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(name)s: %(message)s"
    )
    options = arguments().parse_args(argv)
    return uvloop.run(_serve(options))


async def _serve(options: argparse.Namespace) -> int:
    logger.info("Starting to load model %s", options.model)
    try:
        parts = build(options)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    parts.connector.start(parts.engine.scheduler)
    runner = web.AppRunner(
        parts.api.application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=STOP_DEADLINE_S,
    )
    await runner.setup()
    loop = asyncio.create_task(parts.engine.run())
    stop = asyncio.create_task(_asked_to_stop())
    try:
        context = _tls(options)
        await web.TCPSite(runner, options.host, options.port, ssl_context=context).start()
        scheme = "http" if context is None else "https"
        logger.info("Started server process on %s://%s:%d", scheme, options.host, options.port)
        await asyncio.wait((loop, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (loop, stop):
            task.cancel()
        await asyncio.gather(loop, stop, return_exceptions=True)
        await runner.cleanup()
        await asyncio.to_thread(parts.connector.stop)
    failure = parts.engine.failure
    if failure is not None:
        logger.error("the engine has failed", exc_info=failure)
        return 1
    return 0


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
    connector: Connector | NoConnector = NoConnector()
    if options.kv_transfer_config is not None:
        connector = Connector(
            _connector_config(options.kv_transfer_config),
            cluster_secret(),
            memories,
            fingerprint=fingerprint(shape, options.seed),
            max_model_len=options.max_model_len,
            prefix_caching=options.enable_prefix_caching,
            step_limit_tokens=options.max_num_batched_tokens,
            running_limit_requests=options.max_num_seqs,
        )
    scheduler = Scheduler(
        connector,
        blocks=blocks,
        block_tokens=shape.block_tokens,
        step_limit_tokens=options.max_num_batched_tokens,
        running_limit_requests=options.max_num_seqs,
        prefix_caching=options.enable_prefix_caching,
    )
    faults = FaultBox(initial_faults())
    model = MockModel(shape, options.seed)
    engine = MockEngine(model, memories, scheduler, connector, faults, _timing(options))
    api = MockApi(
        engine,
        faults,
        model=options.served_model_name or options.model,
        max_model_len=options.max_model_len,
        api_key=os.environ.get(API_KEY_ENV, ""),
        secret=cluster_secret() if options.kv_transfer_config is not None else b"",
        allow_faults=options.enable_faults,
    )
    return Parts(engine, connector, api)


def fingerprint(shape: KvShape, seed: int) -> dict[str, str]:
    """What must be equal in two mock engines for one's KV to be usable in the other."""
    return {
        "engine": "mock 1",
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
    blocks: int = options.kv_cache_memory_bytes // (page * shape.layers)
    needed = -(-options.max_model_len // shape.block_tokens) + 1
    if blocks < needed:
        raise ValueError(
            f"max_model_len {options.max_model_len} needs {needed} KV blocks with the null block, "
            f"but --kv-cache-memory-bytes {options.kv_cache_memory_bytes} holds {blocks}"
        )
    return blocks


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    """As vLLM's server makes it of the same flags."""
    if options.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.ssl_ca_certs)
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


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


def _connector_config(text: str) -> ConnectorConfig:
    try:
        settings: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.convert(settings.get("kv_connector_extra_config", {}), ConnectorConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(f"--kv-transfer-config: {error}") from error


async def _asked_to_stop() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    await asked.wait()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mock engine",
        description="An engine without a model: real KV pages, deterministic answers",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a name; nothing is loaded")
    add("--served-model-name", help="the name that clients use (default: --model)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--ssl-certfile")
    add("--ssl-keyfile")
    add("--ssl-ca-certs")
    add("--ssl-cert-reqs", type=int, default=int(ssl.CERT_NONE))
    add("--enable-ssl-refresh", action="store_true", help="ignored: files are read once")
    add("--block-size", type=int, default=32, help="tokens per KV block")
    add("--kv-cache-memory-bytes", type=int, default=16 * 2**20, help="KV of each rank")
    add("--max-model-len", type=int, default=4096, help="longest prompt and answer in tokens")
    add("--max-num-seqs", type=int, default=128, help="requests computed at a time")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens per step")
    add("--tensor-parallel-size", type=int, default=1, help="transfer threads, each with its heads")
    add("--kv-transfer-config", help="JSON with kv_connector_extra_config")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
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
