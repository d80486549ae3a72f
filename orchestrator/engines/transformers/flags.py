"""The transformers engine's command line: vLLM's flags as far as it has them. Imports no model
code.
"""

from __future__ import annotations

import argparse

from splitserve.orchestrator.engines.serving.server import common_flags


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="transformers engine",
        description="A model of Hugging Face transformers over paged KV, without compilation",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder, or the id of a model of the Hub")
    common_flags(parser)
    add("--block-size", type=int, default=128, help="tokens per KV block")
    add("--kv-cache-memory-bytes", type=int, default=10**9)
    add("--max-model-len", type=int, help="longest prompt and answer in tokens (the model's)")
    add("--max-num-seqs", type=int, default=64, help="requests computed at a time")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens per step")
    add("--tensor-parallel-size", type=int, default=1, choices=[1])
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--kv-cache-dtype", default="auto", choices=["auto"])
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--threads", type=int, default=0, help="of a forward pass on CPU (0: one per usable CPU)")
    return parser
