"""What ``splitserve cache advise`` has found, and how it is told: tables, JSON, a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from splitserve.orchestrator.cli.advice_picture import svg
from splitserve.orchestrator.cli.charts import Curve

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.kv_transfer.cache.advice import Saving
    from splitserve.kv_transfer.cache.truncation import Truncated

BAR_CELLS = 20
EXAMPLES = 3


@dataclass(frozen=True)
class Point:
    """One size of cache."""

    saving: Saving
    crowded: Saving | None
    """With more users."""


@dataclass(frozen=True)
class TierAdvice:
    """What one tier adds to those above it; a larger tier holds what a smaller one does."""

    name: str
    saving: Saving
    """Of this tier and those above it."""
    adds_share: float
    """Of prefill, 0 to 1."""
    doubled_adds_share: float
    """What twice this tier's size would add to that."""


@dataclass(frozen=True)
class Findings:
    """Everything that is told about a trace."""

    trace: str
    requests: int
    policy: str
    chunk_tokens: int
    bytes_per_token: int | None
    users_factor: int
    ceiling: Saving
    points: tuple[Point, ...]
    tiers: tuple[TierAdvice, ...]
    blocks: int
    truncated: tuple[Truncated, ...] | None
    """None when the trace cannot tell."""

    def size_text(self, chunks: float) -> str:
        """A size in bytes, or in tokens when their size is not known."""
        tokens = chunks * self.chunk_tokens
        if self.bytes_per_token is None:
            return f"{scaled(tokens)} tokens"
        return scaled(tokens * self.bytes_per_token, "B")


def show(findings: Findings, picture: Path | None) -> None:
    """Print tables and sentences; ``picture`` is where the picture was written."""
    console = Console(soft_wrap=not Console().is_terminal, highlight=False, markup=False)
    ceiling = findings.ceiling
    console.print(
        f"{findings.trace}: {findings.requests:,} requests, {scaled(ceiling.tokens)} prompt tokens"
    )
    console.print(
        f"A cache without bound would hold {findings.size_text(ceiling.capacity_chunks)}, hit "
        f"{ceiling.hit_share:.1%} of chunks and save {ceiling.saved_share:.1%} of prefill."
    )
    console.print(_curve_table(findings))
    if findings.tiers:
        console.print(_tier_table(findings))
    for line in _truncation_lines(findings):
        console.print(line)
    if picture is not None:
        console.print(f"The picture is in {picture}")


def _curve_table(findings: Findings) -> Table:
    table = Table(title=f"Eviction: {findings.policy}", title_justify="left")
    table.add_column("size", justify="right")
    table.add_column("hit chunks", justify="right")
    table.add_column("tokens saved", justify="right")
    table.add_column("of prefill", justify="right")
    if findings.users_factor > 1:
        table.add_column(f"with {findings.users_factor}x users", justify="right")
    table.add_column("of what can be saved", no_wrap=True)
    for point in findings.points:
        saving = point.saving
        table.add_row(
            findings.size_text(saving.capacity_chunks),
            f"{saving.hit_share:.1%}",
            scaled(saving.saved_tokens),
            f"{saving.saved_share:.1%}",
            *([f"{point.crowded.saved_share:.1%}"] if point.crowded is not None else []),
            _bar(_of(saving.saved_tokens, findings.ceiling.saved_tokens)),
        )
    return table


def _tier_table(findings: Findings) -> Table:
    table = Table(title="Tiers", title_justify="left")
    for column in ("tier", "holds", "of prefill", "adds", "twice the size adds"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in findings.tiers:
        table.add_row(
            tier.name,
            findings.size_text(tier.saving.capacity_chunks),
            f"{tier.saving.saved_share:.1%}",
            f"{100 * tier.adds_share:.1f} points",
            f"{100 * tier.doubled_adds_share:.1f} points",
        )
    return table


def _truncation_lines(findings: Findings) -> list[str]:
    found = findings.truncated
    if found is None:
        return ["Whether prompts lost their beginning this trace cannot tell: no content_ids."]
    if not found:
        return ["No prompt repeats an earlier one behind a beginning that was cut off."]
    lost = sum(each.lost for each in found)
    lines = [
        f"{len(found):,} prompts repeat an earlier one behind a beginning that was cut off: "
        f"{lost:,} blocks ({_of(lost, findings.blocks):.1%} of all) miss for that. "
        "Clients that drop old turns should drop many at once, and seldom."
    ]
    for each in sorted(found, key=lambda each: -each.lost)[:EXAMPLES]:
        lines.append(
            f"  request {each.request + 1}: {each.lost} blocks of request {each.earlier + 1} and "
            f"others, {each.dropped} blocks further to the front, behind {each.kept} that are kept"
        )
    return lines


def _bar(share: float) -> str:
    cells = round(share * BAR_CELLS)
    return f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {share:.0%}"


def _of(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def scaled(number: float, unit: str = "") -> str:
    """Three digits, a decimal prefix and the unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".strip()
        number /= 1000
    return f"{number:,.0f} P{unit}"


def picture_of(findings: Findings) -> str:
    """The curve as SVG."""
    curves = [
        Curve(
            findings.policy,
            tuple((p.saving.capacity_chunks, p.saving.saved_share) for p in findings.points),
        )
    ]
    if findings.users_factor > 1:
        crowded = tuple(
            (p.crowded.capacity_chunks, p.crowded.saved_share)
            for p in findings.points
            if p.crowded is not None
        )
        curves.append(Curve(f"with {findings.users_factor} times the users", crowded))
    marks = [(tier.name, float(tier.saving.capacity_chunks)) for tier in findings.tiers]
    title = f"{findings.trace}: {findings.requests:,} requests"
    return svg(title, curves, findings.ceiling.saved_share, marks, findings.size_text)


def json_of(findings: Findings) -> dict[str, Any]:
    """All figures, for programs."""
    truncated = findings.truncated
    return {
        "trace": findings.trace,
        "requests": findings.requests,
        "policy": findings.policy,
        "chunk_tokens": findings.chunk_tokens,
        "bytes_per_token": findings.bytes_per_token,
        "users_factor": findings.users_factor,
        "ceiling": _saving_json(findings, findings.ceiling),
        "sizes": [
            _saving_json(findings, point.saving)
            | (
                {"crowded": _saving_json(findings, point.crowded)}
                if point.crowded is not None
                else {}
            )
            for point in findings.points
        ],
        "tiers": [
            {
                "name": tier.name,
                **_saving_json(findings, tier.saving),
                "adds_share": round(tier.adds_share, 4),
                "doubled_adds_share": round(tier.doubled_adds_share, 4),
            }
            for tier in findings.tiers
        ],
        "truncated": None
        if truncated is None
        else {
            "requests": len(truncated),
            "lost_blocks": sum(each.lost for each in truncated),
        },
    }


def _saving_json(findings: Findings, saving: Saving) -> dict[str, Any]:
    tokens = saving.capacity_chunks * findings.chunk_tokens
    per_token = findings.bytes_per_token
    return {
        "capacity_chunks": saving.capacity_chunks,
        "capacity_bytes": None if per_token is None else tokens * per_token,
        "hit_share": round(saving.hit_share, 4),
        "saved_tokens": saving.saved_tokens,
        "saved_share": round(saving.saved_share, 4),
    }
