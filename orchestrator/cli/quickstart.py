"""``splitserve quickstart``: a cluster up, one streamed chat through its OpenAI surface, where the
time went, everything down again.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from splitserve.orchestrator.cli.model import prepare_command
from splitserve.orchestrator.cli.router_tls import connection_to
from splitserve.orchestrator.cli.running import run_cluster
from splitserve.orchestrator.config import load, tenants_by_key
from splitserve.orchestrator.config.tls import client_context
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.plan import plan
from splitserve.orchestrator.launch.quality_gate import hold_quality
from splitserve.orchestrator.models.catalog import PREPARED_MODELS
from splitserve.orchestrator.models.resolve import is_prepared

if TYPE_CHECKING:
    import http.client
    import ssl
    from collections.abc import Iterator

QUESTION = "Explain in two sentences why the sky is blue."
MAX_TOKENS = 64
_HTTP_TIMEOUT_S = 300.0
_LINE_LIMIT_BYTES = 2**20
_TIMELINE_WAIT_S = 15.0
"""Nodes tell of a transfer twice a second; a busy machine takes longer."""
_TIMELINE_POLL_S = 0.1
_PARTS = {
    "queue": "in the router, until the legs left",
    "retry": "lost with legs that failed",
    "reserve": "until {prefill_node} began; {decode_node} reserved pages meanwhile",
    "prefill": "the prompt was computed",
    "transfer_exposed": "its last pages were on their way to {decode_node}",
    "first_step": "{decode_node} made the first token",
    "decode": "{decode_node} made the rest of the answer",
}
"""Parts of the router's timeline, for people."""


@click.command()
@click.argument("config", default="quickstart")
@click.option("--prompt", default=QUESTION, show_default=True, help="What to ask.")
@click.pass_context
def quickstart(ctx: click.Context, config: str, prompt: str) -> None:
    """Bring CONFIG up, ask it one question, show the answer and where the time went, stop
    everything.
    """
    cluster = load(config)
    path = cluster.model.path
    if cluster.engine != "mock" and path in PREPARED_MODELS and not is_prepared(path):
        ctx.invoke(prepare_command, name=path)
    prepared = plan(config, os.environ)
    keys = list(tenants_by_key(prepared.config, os.environ))
    console = Console(markup=False)
    tls = client_context(prepared.config.security.tls)

    async def ask(url: str) -> None:
        model = prepared.config.model.name
        await asyncio.to_thread(_chat, url, tls, model, prompt, keys[0] if keys else None)

    hold_quality(prepared.config, prepared.source, click.echo)
    asyncio.run(run_cluster(prepared, console, ask))
    click.echo(f"everything has been stopped; `splitserve up {config}` keeps it serving")


def _chat(
    url: str, tls: ssl.SSLContext | None, model: str, prompt: str, api_key: str | None
) -> None:
    """One streamed chat, printed as it comes, and its times."""
    click.echo(f"\n> {prompt}\n")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = connection_to(url, tls, _HTTP_TIMEOUT_S)
    try:
        began = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(_LINE_LIMIT_BYTES).decode(errors="replace")
            raise StartError(f"the chat was answered with status {response.status}", (text,))
        request_id = response.headers.get("x-request-id")
        times = _print_stream(response)
        _print_times(began, times)
        if request_id is not None:
            _print_timeline(connection, request_id, headers)
    finally:
        connection.close()


def _print_stream(response: http.client.HTTPResponse) -> list[float]:
    """Print each piece of the answer; returns when each arrived."""
    times = []
    for event in _events(response):
        if "error" in event:
            raise StartError(f"the stream ended with an error: {event['error']}")
        for choice in event.get("choices", []):
            if text := choice.get("delta", {}).get("content"):
                times.append(time.monotonic())
                click.echo(text, nl=False)
    click.echo("\n")
    if not times:
        raise StartError("the answer was empty")
    return times


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, until ``[DONE]``. Raises ``StartError`` when it ends without."""
    while line := response.readline(_LINE_LIMIT_BYTES):
        text = line.decode(errors="replace").strip()
        if not text.startswith("data:"):
            continue
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            response.read(_LINE_LIMIT_BYTES)
            return
        yield json.loads(data)
    raise StartError("the stream ended before [DONE]")


def _print_times(began: float, times: list[float]) -> None:
    first, last = times[0] - began, times[-1] - began
    click.echo(
        f"first text after {first * 1000:.0f} ms, {len(times)} pieces in {last * 1000:.0f} ms"
    )
    if len(times) > 1:
        click.echo(f"between pieces {(last - first) / (len(times) - 1) * 1000:.0f} ms on average")


def _print_timeline(
    connection: http.client.HTTPConnection, request_id: str, headers: dict[str, str]
) -> None:
    """Where the time went. The router has the whole story once the prefill leg has ended too, and
    the nodes have told of the transfer.
    """
    end = time.monotonic() + _TIMELINE_WAIT_S
    while True:
        connection.request("GET", f"/internal/timeline/{request_id}", headers=headers)
        response = connection.getresponse()
        data = response.read(_LINE_LIMIT_BYTES)
        is_late = time.monotonic() > end
        if response.status == 200:
            record = json.loads(data)
            if is_late or record["decision"] != "split" or record["delivered_ms"] is not None:
                break
        elif is_late:
            click.echo(f"(the router has no timeline of this request: status {response.status})")
            return
        time.sleep(_TIMELINE_POLL_S)
    _print_parts(record)


def _print_parts(record: dict[str, Any]) -> None:
    """One line for each part, the time to the first token between them, and the transfer."""
    click.echo(f"where the time went ({record['decision']}), in ms:")
    for part, ms in record["parts"].items():
        if part == "decode":
            click.echo(f"  {record['first_data_ms']:9.1f}  = time to the first token")
        text = _PARTS.get(part, "").format(**record)
        click.echo(f"  {ms:9.1f}  {part:<17} {text}".rstrip())
    if record["transfer_hidden_ms"] is not None:
        megabytes = record["transfer_bytes"] / 1e6
        click.echo(
            f"{megabytes:.1f} MB of KV travelled: {record['transfer_hidden_ms']:.1f} ms while the "
            f"prompt was computed, {record['transfer_exposed_ms']:.1f} ms after it"
        )
