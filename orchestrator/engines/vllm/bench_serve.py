"""``vllm bench serve`` with its own options, as ``python -m
splitserve.orchestrator.engines.vllm.bench_serve``.

vLLM's command asks for the version of a distribution called ``vllm`` and so fails in the CPU
build, which has another name; it also imports all of the engine. This is the same benchmark behind
the same parser.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
