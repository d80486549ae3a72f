"""``splitserve bench``: a load through a running cluster, by vLLM's own load generator."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from splitserve.orchestrator.cli import bench_report
from splitserve.orchestrator.cli.bench_load import (
    Load,
    check_random,
    is_target,
    targets_of,
    tokenizer_of,
    trace_load,
)
from splitserve.orchestrator.cli.bench_server import Server, cluster_server, compared_server
from splitserve.orchestrator.cli.bench_tool import (
    TOOL,
    Measured,
    ToolError,
    check_installed,
    measure,
    tool_environ,
)
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.running_nodes import RunningNodes, name_of
from splitserve.orchestrator.launch.checks.model import model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

DEFAULT_REQUESTS = 100
COMPARED_ROUNDS = 3
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
PERCENTILES = ("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "90,99")
NUMBERED = ("random", "timed_trace")
"""Datasets whose requests are numbered in the order of the results."""
OFFLINE = ("random", "prefix_repetition", "timed_trace", "custom")

_positive = click.IntRange(min=1)


@dataclass(frozen=True)
class Wish:
    """The options."""

    trace: Path | None
    block_tokens: int
    request_rate: float | None
    num_prompts: int | None
    max_concurrency: int | None
    dataset_name: str
    dataset_path: str | None
    random_input_len: int | None
    random_output_len: int | None
    backend: str
    seed: int
    tokenizer: str | None
    limit_minutes: float
    targets: Mapping[str, float]
    more: tuple[str, ...]
    """For the generator as they are."""


@click.command()
@click.argument("cluster", required=False)
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@click.option("--trace", type=click.Path(path_type=Path), help="Replay recorded requests at their "
    "own times: Mooncake's JSON lines, Azure's CSV, a router's log, or what `splitserve record` "
    "wrote.")  # fmt: skip
@click.option("--block-tokens", default=512, show_default=True, type=_positive,
    help="Tokens of a block in the trace.")  # fmt: skip
@click.option("--request-rate", type=click.FloatRange(min=0, min_open=True), help="Requests per "
    "second; a trace is made as much faster or slower. Default: all at once; its own.")  # fmt: skip
@click.option("--num-prompts", type=_positive, help="Requests to send: the first of a trace "
    f"(default: all of it), else {DEFAULT_REQUESTS}.")  # fmt: skip
@click.option("--max-concurrency", type=_positive, help="Requests that run at a time.")
@click.option("--dataset-name", default="random", show_default=True,
    help="random, sharegpt, custom, prefix_repetition, ...: those of the generator.")  # fmt: skip
@click.option("--dataset-path", help="The file of such a dataset.")
@click.option("--random-input-len", type=_positive, help="Tokens of a random prompt.")
@click.option("--random-output-len", type=_positive, help="Tokens of its answer.")
@click.option("--goodput", multiple=True, metavar="NAME:MS", help="A request is good within these "
    "limits: ttft:200, tpot:20, e2el:3000; several with commas.")  # fmt: skip
@click.option("--backend", type=click.Choice(list(PATHS)), default="openai", show_default=True,
    help="Completions or chats.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), help="Draw the same prompts as "
    "a run with that seed; engines may have them cached. Default: new ones.")  # fmt: skip
@click.option("--tokenizer", help="Folder or Hub id, if not the model's own.")
@click.option("--compare", metavar="URL", help="Send the same load to another OpenAI server too, "
    "in turns; its key is taken from COMPARE_API_KEY.")  # fmt: skip
@click.option("--compare-model", metavar="NAME", help="What that server calls the model; default: "
    "the first that it names.")  # fmt: skip
@click.option("--rounds", type=_positive, default=COMPARED_ROUNDS, show_default=True,
    help="Turns of each server with --compare.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File of the results "
    "(JSON), the picture beside it. Default: bench-CLUSTER-TIME.json here.")  # fmt: skip
@click.option("--limit-minutes", type=click.FloatRange(min=0, min_open=True), default=120.0,
    show_default=True, help="End a run that takes longer.")  # fmt: skip
def bench(
    cluster: str | None,
    more: tuple[str, ...],
    goodput: tuple[str, ...],
    seed: int | None,
    compare: str | None,
    compare_model: str | None,
    rounds: int,
    out: Path | None,
    **options: Any,
) -> None:
    """Send a load through the running cluster CLUSTER (a name, or the YAML it was started from;
    default: the only one that runs) by `vllm bench serve`, and show its table: TTFT, TPOT, ITL,
    E2EL, goodput. Results and a picture are written as files.

    Options of the generator that are not listed here may follow after `--`:

      splitserve bench mock --num-prompts 50 -- --burstiness 0.5 --temperature 0
    """
    words = [word for word in (cluster, *more) if word is not None]
    goals = [word for word in words if is_target(word)]
    words = [word for word in words if not is_target(word)]
    named = words.pop(0) if words and not words[0].startswith("-") else None
    if words and not words[0].startswith("-"):
        raise click.UsageError(f"{words[0]!r} is neither a cluster nor an option after `--`")
    wish = Wish(
        **options,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        targets=targets_of([*goodput, *goals]),
        more=tuple(words),
    )
    _check(wish)
    version = check_installed(wish.dataset_name)
    running = RunningNodes(name_of(named))
    servers = [cluster_server(running.config, running.record.url)]
    if compare is not None:
        servers.append(compared_server(compare, compare_model))
    stem = f"bench-{running.config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = out or Path(f"{stem}.json")
    if path.suffix != ".json" or not path.parent.is_dir():
        raise RefusedError(
            f"--out {path}: name a file that ends in .json, in a folder that is there"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="splitserve-load-") as folder:
        load = _load_of(wish, [s.limit_tokens for s in servers], Path(folder))
        for note in load.notes:
            click.echo(note)
        tokenizer = wish.tokenizer
        if tokenizer is None:
            tokenizer = tokenizer_of(running.config, model_of(running.config), Path(folder))
        runs = Runs(wish, load, tokenizer, servers)
        runs.go(rounds if compare is not None else 1)
    about = {"cluster": _about(running), "tool": TOOL, "tool_version": version}
    runs.tell(path, about)


class Runs:
    """The runs of one command: each server in turn, round after round."""

    def __init__(self, wish: Wish, load: Load, tokenizer: str, servers: Sequence[Server]) -> None:
        self._wish = wish
        self._load = load
        self._tokenizer = tokenizer
        self._servers = servers
        self._by_server: dict[str, list[Measured]] = {server.name: [] for server in servers}
        self._ids: dict[str, str] = {}
        """By server, what the ids of the last run's requests begin with."""

    def go(self, rounds: int) -> None:
        """All are done. Raises ``ToolError``."""
        for number in range(rounds):
            # Who is first changes, for the second may find a warmer machine
            servers = self._servers if number % 2 == 0 else self._servers[::-1]
            for server in servers:
                where = f"round {number + 1} of {rounds}: " if rounds > 1 else ""
                click.echo(f"{where}{self._load.requests} requests to {server.url}")
                measured = self._run(server, self._wish.seed + number)
                if not measured.result.get("completed"):
                    raise ToolError(bench_report.failures(measured.result) or "no request", ())
                self._by_server[server.name].append(measured)

    def tell(self, path: Path, about: dict[str, Any]) -> None:
        """The tables are printed, the results and the picture written."""
        results = {name: [m.result for m in runs] for name, runs in self._by_server.items()}
        for name, runs in self._by_server.items():
            click.echo("" if len(self._servers) == 1 else f"\n{name}, the last round:")
            click.echo("\n".join(runs[-1].table))
            for result in results[name]:
                if failed := bench_report.failures(result):
                    click.echo(failed)
        if len(self._servers) > 1:
            Console(markup=False).print(bench_report.comparison(results), highlight=False)
        self._point_at_slowest()
        path.write_text(json.dumps({**about, **self._document(results)}) + "\n")
        title = f"{self._servers[0].name}, {self._load.requests} requests"
        picture = path.with_suffix(".svg")
        picture.write_text(bench_report.picture(title, results, self._wish.targets))
        click.echo(f"results: {path}, picture: {picture}")

    def _run(self, server: Server, seed: int) -> Measured:
        wish = self._wish
        self._ids[server.name] = f"bench-{secrets.token_hex(4)}-"
        arguments = [
            *("--backend", wish.backend, "--base-url", server.url),
            *("--endpoint", PATHS[wish.backend], "--model", server.model),
            *("--tokenizer", self._tokenizer, "--seed", str(seed)),
            *("--request-id-prefix", self._ids[server.name], *PERCENTILES),
            *self._load.arguments,
        ]
        if wish.max_concurrency is not None:
            arguments += ["--max-concurrency", str(wish.max_concurrency)]
        if wish.targets:
            arguments += ["--goodput", *(f"{n}:{ms:g}" for n, ms in wish.targets.items())]
        arguments += ["--num-prompts", str(self._load.requests), *wish.more]
        is_offline = wish.dataset_name in OFFLINE and Path(self._tokenizer).is_dir()
        environ = tool_environ(
            server.api_key, server.host, seed, is_offline=is_offline, ca_file=server.ca_file
        )
        with _progress() as show:
            return measure(arguments, environ, wish.limit_minutes * 60, show)

    def _point_at_slowest(self) -> None:
        name = self._servers[0].name
        if self._wish.trace is None and self._wish.dataset_name not in NUMBERED:
            return
        found = bench_report.slowest(self._by_server[name][-1].result)
        if found is not None:
            number, ms = found
            command = f"splitserve trace {self._ids[name]}{number} {name}"
            click.echo(f"latest first token, {ms:.0f} ms: `{command}` shows why")

    def _document(self, results: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
        document: dict[str, Any] = {
            "seed": self._wish.seed,
            "goodput_ms": dict(self._wish.targets),
            "load": {**self._load.told, "requests": self._load.requests},
            "notes": [*self._load.notes],
            "runs": [
                {"server": name, "round": number + 1, "result": bench_report.stored(result)}
                for name, found in results.items()
                for number, result in enumerate(found)
            ],
        }
        if len(results) > 1:
            ours, theirs = (bench_report.medians(found) for found in results.values())
            document["ratios"] = bench_report.ratios(ours, theirs)
        return document


def _check(wish: Wish) -> None:
    """Raises ``RefusedError`` for options that do not go together."""
    if wish.trace is not None:
        if wish.dataset_path or wish.dataset_name != "random":
            raise RefusedError("give --trace or a dataset, not both")
        if wish.backend != "openai":
            raise RefusedError(
                "a trace is replayed as prompts of token ids, which chats do not take; leave out "
                "--backend"
            )


def _load_of(wish: Wish, limits: Sequence[int | None], folder: Path) -> Load:
    limit_tokens = min((limit for limit in limits if limit is not None), default=None)
    if wish.trace is not None:
        return trace_load(
            wish.trace,
            wish.block_tokens,
            rate_per_s=wish.request_rate,
            count=wish.num_prompts,
            limit_tokens=limit_tokens,
            limit_s=wish.limit_minutes * 60,
            folder=folder,
        )
    given = {
        "--dataset-name": wish.dataset_name,
        "--dataset-path": wish.dataset_path,
        "--request-rate": wish.request_rate,
    }
    if wish.dataset_name == "random":
        check_random(limit_tokens, wish.random_input_len, wish.random_output_len)
        given["--random-input-len"] = wish.random_input_len
        given["--random-output-len"] = wish.random_output_len
    given = {name: value for name, value in given.items() if value is not None}
    arguments = [word for name, value in given.items() for word in (name, str(value))]
    told = {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}
    return Load(tuple(arguments), wish.num_prompts or DEFAULT_REQUESTS, (), told)


def _about(running: RunningNodes) -> dict[str, Any]:
    """What was measured."""
    nodes = running.nodes()
    roles = [node["role"] for node in nodes.values()]
    return {
        "name": running.config.name,
        "model": running.config.model.name,
        "engine": running.config.engine,
        "prefill_nodes": roles.count("prefill"),
        "decode_nodes": roles.count("decode"),
        "splitserve_version": metadata.version("splitserve"),
    }


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the generator's progress on a terminal, in one line that is gone afterwards."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("the load generator starts") as shown:
        yield lambda line: shown.update(escape(line))
