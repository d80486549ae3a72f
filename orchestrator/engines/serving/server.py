"""The process of an engine of our own: its flags, which are vLLM's as far as they mean something,
and its life from the first byte of memory to SIGTERM.

``VLLM_API_KEY`` is the key that it asks for, ``SPLITSERVE_SECRET`` the cluster secret.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from splitserve.orchestrator.engines.command import API_KEY_ENV
from splitserve.orchestrator.engines.connector_config import ConnectorConfig, cluster_secret
from splitserve.orchestrator.engines.serving.api import EngineApi, Served
from splitserve.orchestrator.engines.serving.connector import Connector, NoConnector
from splitserve.orchestrator.engines.serving.scheduler import Scheduler

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.engines.serving.connector import EngineFacts
    from splitserve.orchestrator.engines.serving.engine import Engine
    from splitserve.orchestrator.engines.serving.memory import RankMemory

STOP_DEADLINE_S = 2.0


@dataclass(frozen=True)
class Parts:
    """An engine before it serves."""

    engine: Engine
    connector: Connector | NoConnector
    api: EngineApi


async def serve(
    options: argparse.Namespace,
    build: Callable[[argparse.Namespace], Parts],
    logger: logging.Logger,
) -> int:
    """Serve what ``build`` makes of the options until SIGTERM or SIGINT; returns the exit status: 2
    for a ``ValueError`` of ``build``, 1 when the engine has failed.
    """
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


def connector_of(
    options: argparse.Namespace, memories: Sequence[RankMemory], facts: EngineFacts
) -> Connector | NoConnector:
    """Raises ``ValueError`` for settings that cannot be read."""
    if options.kv_transfer_config is None:
        return NoConnector()
    return Connector(
        _connector_config(options.kv_transfer_config), cluster_secret(), memories, facts
    )


def scheduler_of(
    options: argparse.Namespace, connector: Connector | NoConnector, facts: EngineFacts, blocks: int
) -> Scheduler:
    """Of an engine with so many blocks."""
    return Scheduler(
        connector,
        blocks=blocks,
        block_tokens=options.block_size,
        step_limit_tokens=facts.step_limit_tokens,
        running_limit_requests=facts.running_limit_requests,
        prefix_caching=facts.prefix_caching,
    )


def served(options: argparse.Namespace, facts: EngineFacts) -> Served:
    """What the HTTP server must know."""
    return Served(
        model=options.served_model_name or options.model,
        max_model_len=facts.max_model_len,
        api_key=os.environ.get(API_KEY_ENV, ""),
        secret=cluster_secret() if options.kv_transfer_config is not None else b"",
        version=facts.engine,
    )


def blocks_of(options: argparse.Namespace, block_bytes: int, max_model_len: int) -> int:
    """How many blocks, the null block included, ``--kv-cache-memory-bytes`` holds. Raises
    ``ValueError`` when the longest request would not fit.
    """
    blocks: int = options.kv_cache_memory_bytes // block_bytes
    needed = -(-max_model_len // options.block_size) + 1
    if blocks < needed:
        raise ValueError(
            f"max_model_len {max_model_len} needs {needed} KV blocks with the null block, "
            f"but --kv-cache-memory-bytes {options.kv_cache_memory_bytes} holds {blocks}"
        )
    return blocks


def common_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every engine of ours."""
    add = parser.add_argument
    add("--served-model-name", help="the name that clients use (default: --model)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--ssl-certfile")
    add("--ssl-keyfile")
    add("--ssl-ca-certs")
    add("--ssl-cert-reqs", type=int, default=int(ssl.CERT_NONE))
    add("--enable-ssl-refresh", action="store_true", help="ignored: files are read once")
    add("--kv-transfer-config", help="JSON with kv_connector_extra_config")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    """As vLLM's server makes it of the same flags."""
    if options.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.ssl_ca_certs)
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


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
