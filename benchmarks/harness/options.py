"""Command-line options that the engine benchmarks share."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Never

from harness.engine import EngineFlags
from harness.systems import Placement

if TYPE_CHECKING:
    from collections.abc import Coroutine


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with the shared options."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--model", default="smollm2-135m", help="prepared model name or folder")
    options.add_argument("--rounds", type=int, default=rounds, help="repeats of every measurement")
    options.add_argument(
        "--quick", action="store_true", help="few, short measurements: a smoke test"
    )
    options.add_argument("--cores", default="0,1", help="core of P, core of D")
    options.add_argument("--transport", default="nixl", help="splitserve's transport")
    options.add_argument("--kv-cache-bytes", type=int, default=200_000_000, help="per engine")
    options.add_argument("--max-model-len", type=int, default=2304, help="tokens")
    options.add_argument("--engine-arg", action="append", default=[], help="further engine flag")
    options.add_argument(
        "--log-folder", type=Path, default=None, help="engine logs; default: temporary"
    )
    options.add_argument("--name", default=None, help="name of the result files")
    return options


def model_folder(name: str) -> Path:
    """The folder of a prepared model, or ``name`` itself when it is a folder."""
    if Path(name, "config.json").is_file():
        return Path(name).resolve()
    from splitserve.orchestrator.models.resolve import resolve_model

    return Path(resolve_model(name).engine_model)


def model_layers(folder: Path) -> int:
    """Number of attention layers: pages of one block."""
    layers: int = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return layers


def engine_flags(options: argparse.Namespace) -> EngineFlags:
    """The flags that every engine of the run gets."""
    return EngineFlags(
        model_folder(options.model),
        kv_cache_bytes=options.kv_cache_bytes,
        max_model_len=options.max_model_len,
        extra=("--enable-prompt-tokens-details", *options.engine_arg),
    )


def placement(options: argparse.Namespace) -> Placement:
    """P's and D's core."""
    prefill, decode = (int(core) for core in options.cores.split(","))
    return Placement(prefill, decode)


def log_folder(options: argparse.Namespace) -> Path:
    """Where engine logs go; exists afterwards."""
    folder: Path = options.log_folder or Path(tempfile.mkdtemp(prefix="splitserve-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def numbers(text: str) -> list[int]:
    """``"128,512"`` as integers."""
    return [int(part) for part in text.split(",") if part]


def names(text: str) -> list[str]:
    """``"plain,pull"`` as names."""
    return [part for part in text.split(",") if part]


def run(main: Coroutine[object, object, int]) -> Never:
    """Run a benchmark and exit with its status; SIGTERM ends it as Ctrl-C does, engines stopped."""

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        sys.exit(asyncio.run(guarded()))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
