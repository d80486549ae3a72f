"""Can a vLLM and a transformers engine compute on with each other's KV?

One cluster per direction: the *writer* is its prefill node, the *reader* its decode node, with the
real model. The two engines have kernels of their own, so their answers differ a little even when
each computes everything itself: that is the *floor*, and sharing KV must stay near it. What is
compared are distributions of the next token, at several places behind a prefix of real prose:

``sent``      the reader alone against the reader with the writer's pages of the prompt
``stored``    the reader alone against the reader with the writer's chunks from the cache
``at once``   as ``sent``, all prompts at the same time: pages of one prompt in another would show

Divergences are Kullback-Leibler in nats, from the likeliest 20 tokens of both and the rest as one.
Their mean has to be at most twice the floor's: the reader alone against the writer alone at the
same places, both cold, nothing shared. At least 95 % of the prompt's blocks must not have been
computed by the reader. Then faults are planted in the writer's transport
(``harness/engine_side/planted_faults.py``): zeroed pages and pages of other positions must exceed
that limit, and the wrapper alone must not.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from harness import options, report
from harness.cached_cluster import CachedCluster
from harness.client import complete
from harness.engine import ENGINE_BYTES_BESIDE_KV, SERVED_NAME, free_port
from harness.product import RunningCluster
from harness.prompts import english_text
from harness.stats import summarise

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

ENGINES = ("vllm", "transformers")
CHUNK, BLOCK = 256, 128
TOP = 20
FLOOR_SHARE = 2.0
LEAST_REUSED = 0.95
TEXT_CHARACTERS = 400_000
PATIENCE_S = 600.0
"""Nothing is given up because the machine is busy."""
FAULTS = ("none", "zero", "shift")
ENGINE_SIDE = Path(__file__).resolve().parent / "harness" / "engine_side"

Distribution = dict[str, float]
"""Natural logarithms by token."""


@dataclass(frozen=True)
class Asked:
    """One place of a text as the engines saw it."""

    name: str
    tokens: int
    computed: int
    """Prompt tokens that the reader computed itself."""
    distribution: Distribution = field(repr=False)

    @property
    def reused(self) -> float:
        """Share of the prompt's blocks that the reader did not compute. The last token is computed
        always, in a block that came.
        """
        blocks = -(-self.tokens // BLOCK)
        return 1 - (self.computed - 1) / (blocks * BLOCK)


class Pair:
    """A writer and a reader of one cluster, and how they are asked."""

    def __init__(
        self, cluster: RunningCluster, session: aiohttp.ClientSession, log: Path, layers: int
    ) -> None:
        self.cached = CachedCluster(cluster, session)  # type: ignore[arg-type]
        self._cluster = cluster
        self._session = session
        self._log = log
        self._layers = layers

    async def alone(self, node: str, prompt: Sequence[int], salt: str | None = None) -> Asked:
        """One engine that takes part in no split; with a salt, one that finds nothing stored."""
        url = (await self.cached.nodes())[node]["engine_url"]
        headers = self._cluster.engine_headers(url)
        answer = await self._complete(url, prompt, headers, salt)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return self._asked(prompt, answer, len(prompt) - cached)

    async def split(self, prompt: Sequence[int]) -> Asked:
        """Through the router; the reader's transfer log says what it lacks."""
        before = len(self._received())
        answer = await self._complete(self._cluster.url, prompt, {}, None)
        return self._asked(prompt, answer, self._computed(len(prompt), self._received()[before:]))

    async def splits(self, prompts: Sequence[Sequence[int]]) -> list[Asked]:
        """All at the same time."""
        before = len(self._received())
        answers = await asyncio.gather(
            *(self._complete(self._cluster.url, prompt, {}, None) for prompt in prompts)
        )
        records = self._received()[before:]
        return [
            self._asked(prompt, answer, self._computed(len(prompt), records))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _computed(self, tokens: int, records: list[dict[str, Any]]) -> int:
        """All of the prompt unless every page that was lacking has landed."""
        for record in records:
            if record["prompt_tokens"] != tokens or record["outcome"] != "landed":
                continue
            blocks = record["first_block"] + record["pages"] // self._layers
            return max(0, tokens - blocks * BLOCK) + 1
        return tokens

    def _received(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        records = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [record for record in records if record["side"] == "receive"]

    async def _complete(
        self, url: str, prompt: Sequence[int], headers: Mapping[str, str], salt: str | None
    ) -> dict[str, Any]:
        body = {
            "model": SERVED_NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0,
            "logprobs": TOP, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        if salt is not None:
            body["cache_salt"] = salt
        return (await complete(self._session, url, body, dict(headers))).body

    def _asked(self, prompt: Sequence[int], answer: dict[str, Any], computed: int) -> Asked:
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return Asked(answer["id"], len(prompt), computed, top)


def divergence(ours: Distribution, theirs: Distribution) -> float:
    """Of ``theirs`` from ``ours`` in nats; tokens that not both name count as one. A lower bound of
    the whole vocabulary's.
    """
    named = ours.keys() & theirs.keys()
    pairs = [(math.exp(ours[token]), math.exp(theirs[token])) for token in named]
    rest = [max(1e-12, 1 - sum(side)) for side in zip(*pairs, strict=True)] if pairs else [1, 1]
    return sum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])] if p > 0)


def agree(ours: Distribution, theirs: Distribution) -> bool:
    """Whether the likeliest token is the same."""
    return max(ours, key=ours.__getitem__) == max(theirs, key=theirs.__getitem__)


@dataclass
class Row:
    """One comparison of a direction."""

    direction: str
    kind: str
    floor: list[float]
    """Between the two engines at the same places, with nothing shared."""
    divergences: list[float]
    floor_agreement: float
    agreement: float
    """Share of the places where the likeliest token is the same."""
    reused: float
    """Least share of a prompt's blocks that the reader did not compute."""

    @property
    def ratio(self) -> float:
        """Times the floor's mean."""
        return sum(self.divergences) / max(sum(self.floor), 1e-12)


@dataclass
class Places:
    """What was asked at the same places: of the reader alone, of the writer alone, and of the
    reader with the writer's KV.
    """

    own: list[Asked] = field(default_factory=list)
    foreign: list[Asked] = field(default_factory=list)
    shared: list[Asked] = field(default_factory=list)

    def row(self, direction: str, kind: str) -> Row:
        """What comes of comparing them place by place."""
        floor, floor_agreement = compared(self.own, self.foreign)
        divergences, agreement = compared(self.own, self.shared)
        reused = min(one.reused for one in self.shared)
        return Row(direction, kind, floor, divergences, floor_agreement, agreement, reused)


def compared(ours: Sequence[Asked], theirs: Sequence[Asked]) -> tuple[list[float], float]:
    """The divergences, and the share of places with the same likeliest token."""
    pairs = [(a.distribution, b.distribution) for a, b in zip(ours, theirs, strict=True)]
    return [divergence(a, b) for a, b in pairs], sum(agree(a, b) for a, b in pairs) / len(pairs)


class Texts:
    """Prose that nobody has seen yet, as prompts of a prefix and a little more."""

    def __init__(self, folder: Path, prefix: int, places: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._ids: list[int] = tokenizer.encode(english_text()[:TEXT_CHARACTERS])
        self._prefix, self._places = prefix, places
        self._next = 0

    def take(self) -> list[list[int]]:
        """The same text up to each place."""
        start, self._next = self._next, self._next + self._prefix + self._places
        return [self._ids[start : start + self._prefix + more + 1] for more in range(self._places)]


async def measure(pair: Pair, direction: str, texts: Texts, count: int) -> list[Row]:
    """The rows without faults."""
    return [
        (await sent(pair, texts, count, "sent")).row(direction, "sent"),
        (await stored(pair, texts, count)).row(direction, "stored"),
        (await at_once(pair, texts, 4 * count)).row(direction, "at once"),
    ]


async def ask_alone(pair: Pair, places: Places, prompt: Sequence[int], salt: str) -> None:
    """Both engines, which know nothing of the prompt that the other has computed."""
    places.own.append(await pair.alone("decode-0", prompt, salt))
    places.foreign.append(await pair.alone("prefill-0", prompt, salt))


async def sent(pair: Pair, texts: Texts, count: int, name: str) -> Places:
    """Prompts go through the router, one at a time."""
    places = Places()
    for number in range(count):
        for prompt in texts.take():
            await ask_alone(pair, places, prompt, f"{name} {number}")
            places.shared.append(await pair.split(prompt))
    return places


async def stored(pair: Pair, texts: Texts, count: int) -> Places:
    """The writer stores each prefix; the reader, which has forgotten everything, asks the cache."""
    places = Places()
    for number in range(count):
        prompts = texts.take()
        await pair.alone("prefill-0", prompts[0])
        await pair.cached.wait_until_held(prompts[0][: len(prompts[0]) // CHUNK * CHUNK], ("cpu",))
        await pair.cached.forget_in_engines()
        for prompt in prompts:
            await ask_alone(pair, places, prompt, f"stored {number}")
            places.shared.append(await pair.alone("decode-0", prompt))
    return places


async def at_once(pair: Pair, texts: Texts, count: int) -> Places:
    """Lengths differ by one token, so that each prompt's record is its own."""
    prompts = [texts.take()[-1] for _ in range(count)]
    prompts = [prompt[: len(prompt) - number] for number, prompt in enumerate(prompts)]
    places = Places()
    for number, prompt in enumerate(prompts):
        await ask_alone(pair, places, prompt, f"at once {number}")
    places.shared = await pair.splits(prompts)
    return places


def plant(fault_file: Path, fault: str) -> None:
    """The writer's next pages go wrong like this."""
    fault_file.write_text(fault)


async def planted(
    pair: Pair, direction: str, texts: Texts, fault_file: Path, count: int
) -> list[Row]:
    """Each fault on texts of its own; afterwards things are right again."""
    rows = []
    for fault in FAULTS:
        plant(fault_file, fault)
        places = await sent(pair, texts, count, fault)
        rows.append(places.row(direction, f"fault: {fault}"))
    plant(fault_file, "none")
    return rows


def problems(rows: Sequence[Row]) -> list[str]:
    """What is not as it must be."""
    found = []
    for each in rows:
        where = f"{each.direction}, {each.kind}"
        must_exceed = each.kind in ("fault: zero", "fault: shift")
        if must_exceed != (each.ratio > FLOOR_SHARE):
            found.append(f"{where}: {each.ratio:.2f} times the floor, the limit is {FLOOR_SHARE:g}")
        if each.reused < LEAST_REUSED:
            found.append(f"{where}: only {each.reused:.1%} of the blocks were reused")
    return found


def described(
    name: str, writer: str, reader: str, settings: argparse.Namespace, logs: Path
) -> dict[str, Any]:
    """The cluster's YAML."""
    prefill, decode = (int(core) for core in settings.cores.split(","))
    layers = options.model_layers(options.model_folder(settings.model))
    env = {"VLLM_SERVER_DEV_MODE": "1", "SPLITSERVE_TRANSFER_LOG": str(logs / "transfers.jsonl")}
    faults = {
        "PYTHONPATH": str(ENGINE_SIDE),
        "PLANTED_FAULT_FILE": str(logs / "fault"),
        "PLANTED_FAULT_LAYERS": str(layers),
    }

    def pool(engine: str, core: int, more: dict[str, str]) -> dict[str, Any]:
        args: dict[str, Any] = {
            "dtype": settings.dtype, "block_size": BLOCK, "max_model_len": settings.max_model_len
        }  # fmt: skip
        if engine == "vllm":
            args["enable_prompt_tokens_details"] = True
        return {
            "engine": engine, "cpus": [[core]], "kv_cache_bytes": settings.kv_cache_bytes,
            "env": env | more, "engine_args": args,
            "transfer": {"transport": settings.transport, "deadline_s": PATIENCE_S},
        }  # fmt: skip

    return {
        "name": name,
        "model": {"path": str(options.model_folder(settings.model)), "served_name": SERVED_NAME},
        "router": {
            "port": free_port(),
            "queue_timeout_s": PATIENCE_S,
            "first_token_deadline_s": PATIENCE_S,
        },
        "prefill": pool(writer, prefill, faults),
        "decode": pool(reader, decode, {}),
        "cache": {
            "chunk_tokens": CHUNK,
            "tiers": [{"type": "cpu", "capacity_bytes": settings.cache_bytes}],
        },
        "observability": {"log_dir": str(logs / "cluster")},
    }


def patient_session() -> aiohttp.ClientSession:
    """A connection per request: vLLM closes one that was idle for five seconds, and a busy machine
    makes it so now and then in the moment of the next request.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
    )


async def direction_rows(writer: str, reader: str, settings: argparse.Namespace) -> list[Row]:
    """One cluster from start to end."""
    logs = options.log_folder(settings) / f"{writer}-to-{reader}"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "fault").write_text("none")
    (logs / "transfers.jsonl").unlink(missing_ok=True)
    folder = options.model_folder(settings.model)
    texts = Texts(folder, settings.prefix, settings.places)
    name = f"cross-{os.getpid()}-{writer[0]}"
    needed = 2 * (ENGINE_BYTES_BESIDE_KV + settings.kv_cache_bytes)
    direction = f"{writer} to {reader}"
    spec = described(name, writer, reader, settings, logs)
    with RunningCluster(spec, logs, needed) as cluster:
        await cluster.start()
        async with patient_session() as session:
            layers = options.model_layers(folder)
            pair = Pair(cluster, session, logs / "transfers.jsonl", layers)
            rows = await measure(pair, direction, texts, settings.texts)
            rows += await planted(
                pair, direction, texts, logs / "fault", max(1, settings.texts // 2)
            )
    for each in rows:
        print(direction, each.kind, f"{each.ratio:.2f} times the floor", flush=True)
    return rows


def section(rows: Sequence[Row]) -> str:
    """The table."""
    lines = []
    for each in rows:
        floor, found = summarise(each.floor), summarise(each.divergences)
        lines.append(
            [
                each.direction, each.kind, str(len(each.divergences)),
                f"{sum(each.floor) / len(each.floor):.2e}", f"{floor.median:.2e}",
                f"{sum(each.divergences) / len(each.divergences):.2e}", f"{found.median:.2e}",
                f"{max(each.divergences):.2e}", f"{each.ratio:.2f}",
                f"{each.floor_agreement:.0%}, {each.agreement:.0%}", f"{each.reused:.1%}",
            ]
        )  # fmt: skip
    header = (
        "direction", "KV", "places", "floor: mean KL", "median", "with it: mean KL", "median",
        "largest", "times the floor", "same likeliest token: floor, with it",
        "blocks reused, least",
    )  # fmt: skip
    return report.table(header, lines)


async def main() -> int:
    """Measure, write the report, fail when something is not as it must be."""
    parser = options.parser(__doc__ or "", rounds=1)
    parser.set_defaults(transport="tcp", max_model_len=2048)
    parser.add_argument("--dtype", default="bfloat16", help="of both engines")
    parser.add_argument("--texts", type=int, default=4, help="pieces of prose per comparison")
    parser.add_argument("--prefix", type=int, default=512, help="tokens before the first place")
    parser.add_argument("--places", type=int, default=6, help="places in each text")
    parser.add_argument("--cache-bytes", type=int, default=1_000_000_000, help="of the CPU tier")
    settings = parser.parse_args()
    if settings.quick:
        settings.texts, settings.places = 2, 3
    rows: list[Row] = []
    for writer, reader in (ENGINES, ENGINES[::-1]):
        rows += await direction_rows(writer, reader, settings)
    wrong = problems(rows)
    verdict = "All as it must be." if not wrong else "Not as it must be:\n\n- " + "\n- ".join(wrong)
    shape = (
        f"{settings.model}, {settings.dtype}, {settings.texts} texts of {settings.prefix} tokens "
        f"with {settings.places} places each; a block has {BLOCK} tokens, a chunk {CHUNK}. "
        f"Limits: {FLOOR_SHARE:g} times the floor's mean, {LEAST_REUSED:.0%} of the blocks."
    )
    payload = {"rows": [asdict(each) for each in rows], "problems": wrong}
    name = settings.name or "cross-engine"
    path = report.write(name, "KV across engines", payload, [shape, section(rows), verdict])
    print(path.read_text())
    return 1 if wrong else 0


if __name__ == "__main__":
    options.run(main())
