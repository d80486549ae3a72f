"""The cache server as a process: ``python -m splitserve.kv_transfer.cache SETTINGS.json``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splitserve.kernels.compiled_quantise import warm_up
from splitserve.kernels.quantise import NUMBERS
from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
from splitserve.kv_transfer.cache.codecs.names import RAW
from splitserve.kv_transfer.cache.server import CacheServer
from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.kv_transfer.cache.tiers.base import Tier, TierConfigError, TierError
from splitserve.kv_transfer.cache.tiers.registry import create

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.kv_transfer.cache.sealing import Sealer

logger = logging.getLogger("splitserve.cache")

EXIT_REFUSED = 2
"""The settings cannot be used; another attempt will not help."""


def main() -> int:
    """The process's exit status."""
    return serve(Path(sys.argv[1]), os.environ)


def serve(path: Path, environ: Mapping[str, str]) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or ``EXIT_REFUSED``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=CacheSettings)
        codec = ChunkCodec(_sealer(settings, environ))
        tiers = [_tier(tier) for tier in settings.tiers if tier.type != "cpu"]
        _warm_up_codecs(settings)
        server = CacheServer(settings, tiers, codec)
    except (TierConfigError, msgspec.DecodeError, ValueError, OSError) as error:
        logger.error("the cache server cannot start: %s", error)
        return EXIT_REFUSED
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    logger.info("serving on %s", settings.socket_path)
    server.run()
    return 0


def _warm_up_codecs(settings: CacheSettings) -> None:
    """Codecs are tried on the first chunks: no look-up waits then for the compiler, which holds up
    the whole process.
    """
    if any(tier.type != "cpu" and tier.codec != RAW for tier in settings.tiers):
        for number in NUMBERS:
            warm_up(number)


def _tier(settings: TierSettings) -> Tier:
    """A tier; one whose store does not answer yet is used when it does."""
    tier = create(settings)
    try:
        tier.check()
    except TierConfigError:
        tier.close()
        raise
    except TierError as error:
        logger.warning("starting without: %s", error)
    return tier


def _sealer(settings: CacheSettings, environ: Mapping[str, str]) -> Sealer | None:
    if not settings.encrypt:
        return None
    from splitserve.kv_transfer.cache.sealing import Sealer

    secret = environ.get(settings.secret_env, "")
    if not secret:
        raise ValueError(f"cache.encrypt is on and {settings.secret_env} is not set")
    return Sealer(bytes.fromhex(secret))


if __name__ == "__main__":
    sys.exit(main())
