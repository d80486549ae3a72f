"""Does a split request answer exactly as one plain engine, for the right reasons?

A plain engine answers 100 greedy prompts; a pair answers the same ones at concurrency 1 and 8 and
must give the same token ids and text. An equal answer alone proves little: D could have computed
the prompt itself. So for each request the benchmark also asserts that

- the pages sent and received are those that D lacked: layers x (blocks of the prompt - D's own
  hit);
- D's own hit is what the order of prompts says (at concurrency 1; at most that at 8);
- the first page was written before P's last layer, where there is more than ``stream_min_bytes``;
- over the whole run D's engine took every prompt token from cache or transfer (vLLM recomputes the
  last one to sample from it; of a prompt of one token nothing is left to transfer).

Then faults are planted in P's transport (``harness/engine_side/planted_faults.py``): swapped pages,
a zeroed page, a wrong layer. The same comparison must fail for each, and pass with the wrapper
alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness import options, report, transfer_log
from harness.client import RequestFailedError, metrics, new_session
from harness.engine import SERVED_NAME, EnginePark
from harness.prompts import english_text, random_prompt
from harness.systems import SplitserveSystem, make_system

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    import aiohttp
    from harness.engine import Engine
    from harness.systems import System

OUTPUT_TOKENS = 16
PROMPTS = 100
LONGEST = 3000
CONCURRENCIES = (1, 8)
BLOCK_COUNTS = (1, 2, 3, 5, 9, 16)
SHARED_PREFIXES = (100, 128, 255, 256, 300, 640, 1000)
GROUP = 4
FAULT_PHASES = ("none", "swap", "zero", "layer")
FAULT_CASES = 8
RESET_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Case:
    """One prompt."""

    name: str
    prompt: list[int] = field(repr=False)
    shared_blocks: int = 0
    """Leading blocks that the prompt before it has too."""


@dataclass(frozen=True)
class Reply:
    """What is compared."""

    token_ids: tuple[int, ...]
    text: str


@dataclass
class Finding:
    """How one case went at one concurrency; ``problems`` is empty when all is as it must be."""

    case: str
    length: int
    concurrency: int
    equal: bool = False
    first_block: int = -1
    pages: int = -1
    streamed: bool | None = None
    problems: list[str] = field(default_factory=list)


def cases(english: list[int], block: int, count: int) -> list[Case]:
    """Lengths 1 to 3,000, block multiples and their neighbours, groups with a shared prefix."""
    source = random.Random("equality")
    lengths = [1, 2, 3, 17, 64, LONGEST]
    lengths += [block * blocks + by for blocks in BLOCK_COUNTS for by in (-1, 0, 1)]
    grouped = [
        case for index, shared in enumerate(SHARED_PREFIXES) for case in group(index, shared, block)
    ]
    lengths += [
        source.randint(1, LONGEST // 2) for _ in range(PROMPTS - len(lengths) - len(grouped))
    ]
    single = []
    for index, length in enumerate(lengths):
        if index % 2:
            start = source.randrange(len(english) - length)
            single.append(Case(f"english-{length}", english[start : start + length]))
        else:
            single.append(Case(f"random-{length}", random_prompt(length, "equality", index)))
    units = [[case] for case in single] + [
        grouped[i : i + GROUP] for i in range(0, len(grouped), GROUP)
    ]
    source.shuffle(units)
    return [case for unit in units for case in unit][:count]


def group(index: int, shared: int, block: int) -> list[Case]:
    """Four prompts that begin with the same ``shared`` tokens."""
    prefix = random_prompt(shared, "shared", index)
    out = []
    for member in range(GROUP):
        suffix = random_prompt(30 + 97 * member, "suffix", index, member)
        reused = shared // block if member else 0
        out.append(Case(f"shared-{shared}-{member}", [*prefix, *suffix], reused))
    return out


def body(case: Case) -> dict[str, Any]:
    """Greedy, a fixed number of tokens, ids in the answer."""
    return {
        "model": SERVED_NAME,
        "prompt": case.prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def answer_all(
    system: System, session: aiohttp.ClientSession, todo: list[Case]
) -> dict[str, Reply]:
    """The plain engine's replies, one request at a time."""
    replies = {}
    for case in todo:
        streamed = (await system.serve(session, body(case))).streamed
        replies[case.name] = Reply(streamed.token_ids, streamed.text)
    return replies


class Pair:
    """A splitserve pair and what its requests must look like."""

    def __init__(
        self, system: SplitserveSystem, session: aiohttp.ClientSession, layers: int
    ) -> None:
        self.system = system
        self.session = session
        self.layers = layers

    async def run(
        self, todo: list[Case], expected: dict[str, Reply], concurrency: int
    ) -> list[Finding]:
        """All cases at this concurrency, in order of start."""
        waiting = iter(todo)
        findings: list[Finding] = []

        async def worker() -> None:
            for case in waiting:
                findings.append(await self.examine(case, expected[case.name], concurrency))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return findings

    async def examine(self, case: Case, expected: Reply, concurrency: int) -> Finding:
        """Serve one case and compare everything that can be compared."""
        finding = Finding(case.name, len(case.prompt), concurrency)
        try:
            served = await self.system.serve(self.session, body(case))
        except RequestFailedError as error:
            finding.problems.append(f"failed: {error}")
            return finding
        streamed = served.streamed
        finding.equal = Reply(streamed.token_ids, streamed.text) == expected
        if not finding.equal:
            finding.problems.append(f"answered {streamed.text!r}, plain engine {expected.text!r}")
        if len(case.prompt) == 1:
            return finding  # Its only token is the one that D computes itself: nothing to send.
        try:
            transfer = await transfer_log.wait_for(self.system.transfer_logs, served.transfer_id)
        except transfer_log.MissingRecordError as error:
            finding.problems.append(str(error))
            return finding
        self.examine_transfer(case, transfer, finding)
        return finding

    def examine_transfer(
        self, case: Case, transfer: transfer_log.Transfer, finding: Finding
    ) -> None:
        """Pages, D's own hit and the time of the first write."""
        send, receive = transfer.send, transfer.receive
        block = self.system.flags.block_tokens
        blocks = -(-len(case.prompt) // block)
        first = receive["first_block"]
        expected_pages = self.layers * (blocks - first)
        finding.first_block, finding.pages = first, receive["pages"]
        for side, record in (("sent", send), ("received", receive)):
            if record["pages"] != expected_pages:
                finding.problems.append(
                    f"{record['pages']} pages {side}, {expected_pages} expected"
                )
        outcomes = (send["outcome"], receive["outcome"], send["attempt"])
        if outcomes != ("delivered", "landed", 1):
            finding.problems.append(f"outcomes (send, receive, attempt) are {outcomes}")
        hit_is_right = (
            first == case.shared_blocks
            if finding.concurrency == 1
            else (0 <= first <= case.shared_blocks)
        )
        if not hit_is_right:
            finding.problems.append(f"D had {first} blocks itself, {case.shared_blocks} expected")
        layer_bytes = receive["bytes"] // self.layers
        if receive["bytes"] > self.system.stream_min + layer_bytes:
            finding.streamed = transfer.streamed
            if not transfer.streamed:
                finding.problems.append("the first page was written after P's last layer")

    async def forget(self) -> None:
        """Both engines' prefix caches are empty. Raises ``RequestFailedError``."""
        for engine in self.system.engines:
            await reset_prefix_cache(self.session, engine)

    async def computed_prompt_tokens(self) -> float:
        """Prompt tokens that D's engine has computed itself so far."""
        values = await metrics(self.session, self.system.engines[1].url)
        return sum(
            value
            for series, value in values.items()
            if series.startswith("vllm:prompt_tokens_by_source_total") and "local_compute" in series
        )


async def reset_prefix_cache(session: aiohttp.ClientSession, engine: Engine) -> None:
    """Succeeds once the engine holds no block any more: finished transfers have released theirs."""
    deadline = time.monotonic() + RESET_DEADLINE_S
    while time.monotonic() < deadline:
        values = await metrics(session, engine.url)
        usage = [value for series, value in values.items() if "kv_cache_usage_perc" in series]
        if usage and max(usage) == 0.0:
            async with session.post(f"{engine.url}/reset_prefix_cache") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise RequestFailedError(f"{engine.spec.name} still holds blocks: {usage}")


async def tokenise(session: aiohttp.ClientSession, url: str, text: str) -> list[int]:
    """Token ids of ``text`` by the engine's own tokenizer."""
    request = {"model": SERVED_NAME, "prompt": text, "add_special_tokens": False}
    async with session.post(f"{url}/tokenize", json=request) as response:
        ids: list[int] = (await response.json())["tokens"]
        return ids


def is_fit_for_faults(case: Case, block: int) -> bool:
    """Computed by P in one go, several blocks, the last one partly filled."""
    length = len(case.prompt)
    return block < length <= 12 * block and length % block != 0 and not case.shared_blocks


async def faults(
    pair: Pair, todo: list[Case], expected: dict[str, Reply], fault_file: Path
) -> dict[str, dict[str, Any]]:
    """Each phase has prompts of its own, so that no page is right by what an earlier one left."""
    suitable = [case for case in todo if is_fit_for_faults(case, pair.system.flags.block_tokens)]
    results = {}
    for index, phase in enumerate(FAULT_PHASES):
        chosen = suitable[index :: len(FAULT_PHASES)][:FAULT_CASES]
        await asyncio.to_thread(fault_file.write_text, phase)
        findings = await pair.run(chosen, expected, concurrency=1)
        unequal = sum(not finding.equal for finding in findings)
        noticed = any(finding.problems for finding in findings)
        results[phase] = {
            "prompts": len(chosen),
            "unequal": unequal,
            "as_expected": (not noticed) if phase == "none" else unequal > 0,
        }
        print(f"planted {phase}: {unequal} of {len(chosen)} answers differ", flush=True)
    return results


async def main(arguments: argparse.Namespace) -> int:
    """All phases; 0 when every answer and every count was right and every fault was noticed."""
    logs = options.log_folder(arguments)
    print(f"engine logs: {logs}", flush=True)
    flags, place = options.engine_flags(arguments), options.placement(arguments)
    layers = options.model_layers(flags.model)
    results: dict[str, Any] = {"transport": arguments.transport, "output_tokens": OUTPUT_TOKENS}
    async with new_session() as session:
        with EnginePark(logs) as park:
            plain = make_system("plain", flags, place, logs)
            await plain.start(park)
            english = await tokenise(session, plain.engines[0].url, english_text()[:200_000])
            todo = cases(english, flags.block_tokens, 20 if arguments.quick else PROMPTS)
            expected = await answer_all(plain, session, todo)
            print(f"plain engine: {len(expected)} answers", flush=True)
        findings: list[Finding] = []
        with EnginePark(logs) as park:
            system = SplitserveSystem(
                "splitserve", flags, place, transport=arguments.transport, log_folder=logs
            )
            await system.start(park)
            pair = Pair(system, session, layers)
            for concurrency in CONCURRENCIES:
                found = await pair.run(todo, expected, concurrency)
                findings += found
                await pair.forget()
                print(summary_line(found, concurrency), flush=True)
            of_one_token = sum(len(case.prompt) == 1 for case in todo) * len(CONCURRENCIES)
            computed = await pair.computed_prompt_tokens()
            results["d_computed_prompt_tokens"] = computed - of_one_token
        if not arguments.no_faults:
            fault_file = logs / "planted_fault"
            fault_file.write_text("none")
            with EnginePark(logs) as park:
                system = SplitserveSystem(
                    "faulty", flags, place, transport=arguments.transport,
                    fault_file=fault_file, layers=layers, log_folder=logs,
                )  # fmt: skip
                await system.start(park)
                pair = Pair(system, session, layers)
                results["faults"] = await faults(pair, todo, expected, fault_file)
    results["findings"] = [asdict(finding) for finding in findings]
    results["passed"] = (
        not any(finding.problems for finding in findings)
        and results["d_computed_prompt_tokens"] == 0
        and all(phase["as_expected"] for phase in results.get("faults", {}).values())
    )
    path = report.write(
        arguments.name or "equality", "Equality with one engine", results, sections(results)
    )
    print(path.read_text())
    return 0 if results["passed"] else 1


def summary_line(findings: list[Finding], concurrency: int) -> str:
    """One line for the terminal."""
    equal = sum(finding.equal for finding in findings)
    bad = [finding for finding in findings if finding.problems]
    first = f"; first: {bad[0].case}: {bad[0].problems}" if bad else ""
    return (
        f"concurrency {concurrency}: {equal}/{len(findings)} equal, {len(bad)} with problems{first}"
    )


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    rows = []
    for concurrency in CONCURRENCIES:
        found = [f for f in results["findings"] if f["concurrency"] == concurrency]
        long_enough = [f for f in found if f["streamed"] is not None]
        rows.append(
            [
                str(concurrency),
                f"{sum(f['equal'] for f in found)} of {len(found)}",
                f"{sum(not f['problems'] for f in found)} of {len(found)}",
                f"{sum(f['streamed'] for f in long_enough)} of {len(long_enough)}",
                str(sum(f["first_block"] > 0 for f in found)),
            ]
        )
    header = ["concurrency", "equal", "every check passed", "streamed", "with a prefix hit on D"]
    parts = [
        f"**{'Passed' if results['passed'] else 'FAILED'}.** Transport `{results['transport']}`, "
        f"{results['output_tokens']} output tokens, greedy, float32. D computed "
        f"{results['d_computed_prompt_tokens']:.0f} prompt tokens beside the last one of each.",
        report.table(header, rows),
    ]
    if "faults" in results:
        lines = [
            [phase, f"{entry['unequal']} of {entry['prompts']}", str(entry["as_expected"])]
            for phase, entry in results["faults"].items()
        ]
        parts += ["## Planted faults", report.table(["fault", "unequal", "as expected"], lines)]
    if problems := [f for f in results["findings"] if f["problems"]]:
        lines = [
            [f["case"], str(f["concurrency"]), "; ".join(f["problems"])] for f in problems[:20]
        ]
        parts += ["## Problems", report.table(["case", "concurrency", "problems"], lines)]
    return parts


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser("Equality of split answers with one plain engine", rounds=1)
    parser.add_argument("--no-faults", action="store_true", help="leave out the planted faults")
    parser.set_defaults(max_model_len=LONGEST + 128, kv_cache_bytes=800_000_000)
    return parser.parse_args()


if __name__ == "__main__":
    options.run(main(parse()))
