"""``splitserve cache``: the shared cache of a running cluster, looked at and managed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.cache_tables import print_quotas, print_stat, size
from splitserve.orchestrator.cli.errors import EXIT_FAILED, RefusedError
from splitserve.orchestrator.cli.router_client import RouterClient
from splitserve.orchestrator.cli.up import chosen_cluster, not_running
from splitserve.orchestrator.config.fields import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

    Command = Callable[..., None]

NO_BOUND = "none"
_NEGATIVE = re.compile(r"-\s*[0-9.]")

_cluster = click.option("--cluster", help="The cluster's name (default: the only one that runs).")
_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=600),
    default=30.0,
    show_default=True,
    help="Seconds that it may take; what is not done by then counts as missing.",
)
_PROMPT_OPTIONS = (
    click.option("--prompt", help="The prompt's text."),
    click.option("--prompt-file", type=click.File(), help="A file with the text; - is stdin."),
    click.option(
        "--messages",
        "messages_file",
        type=click.File(),
        help="A JSON file with a chat's messages, or with a whole chat request.",
    ),
    click.option("--tokens", "tokens_file", type=click.File(), help="A JSON file: token ids."),
    click.option("--tenant", help="Whose chunks; required when the cluster has API keys."),
    click.option("--salt", "cache_salt", default="", help="The `cache_salt` of its requests."),
    click.option("--adapter", default="", help="The adapter (LoRA) of its requests."),
)
TOKEN_IDS = 2**32
"""All ids are below."""
SHOWN_CHARACTERS = 60
"""Of an entry that is no token id."""
_OF_A_CHAT = ("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")
"""Fields of a chat request on which its tokens depend."""


def _of_a_prompt(command: Command) -> Command:
    """``command`` takes a prompt, whose it is, and what every command takes."""
    for option in reversed((*_PROMPT_OPTIONS, _timeout, _cluster, _json)):
        command = option(command)
    return command


@click.group()
def cache() -> None:
    """Look at the shared cache of KV, and manage it."""


@cache.command()
@_cluster
@_json
def stat(cluster: str | None, as_json: bool) -> None:
    """Show tiers, tenants and engines of the cache."""
    found = _router(cluster).cache("", None)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        print_stat(found)


@cache.command()
@_of_a_prompt
def lookup(cluster: str | None, as_json: bool, **options: Any) -> None:
    """Show which tier holds how many tokens of a prompt."""
    found = _router(cluster).cache("lookup", _chunks(options))
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    click.echo(f"{found['cached_tokens']} of {found['tokens']} tokens are cached")
    longest = found["max_model_len"]
    if longest is not None and found["tokens"] >= longest:
        click.echo(
            f"  no engine serves this prompt: prompt and answer may have {longest} tokens together "
            "(max_model_len)"
        )
    for name, tokens in found["tiers"].items():
        silent = " (does not answer)" if name in found["silent_tiers"] else ""
        click.echo(f"  {name}: {tokens}{silent}")
    if found["pinned_tokens"]:
        click.echo(f"  pinned: {found['pinned_tokens']}")


@cache.command()
@_of_a_prompt
@click.option("--tier", default="", help="Where (default: where each chunk is).")
def pin(**options: Any) -> None:
    """Keep a prompt's chunks from being evicted. Exit status 1 when some are not there."""
    _change("pin", "pinned", options)


@cache.command()
@_of_a_prompt
@click.option("--tier", default="", help="Where (default: everywhere).")
def unpin(**options: Any) -> None:
    """Let a prompt's chunks be evicted again. Exit status 1 when some were not pinned."""
    _change("unpin", "unpinned", options)


@cache.command()
@_of_a_prompt
@click.option("--tier", default="", help="Where to (default: memory).")
def prefetch(**options: Any) -> None:
    """Bring a prompt's chunks up before they are needed. Exit status 1 when some are not there."""
    _change("prefetch", "there", options)


@cache.command()
@_of_a_prompt
@click.option("--tier", required=True, help="Where to.")
def move(**options: Any) -> None:
    """Put a prompt's chunks into a tier and out of those above it. Exit status 1 when some are not
    there.
    """
    _change("move", "moved", options)


@cache.command()
@click.option("--tenant", help="Only this tenant's chunks.")
@click.option("--tier", default="", help="Only there.")
@click.option("--all", "everything", is_flag=True, help="Everybody's chunks, in every tier.")
@click.option("--pinned", "also_pinned", is_flag=True, help="Also those that are pinned.")
@_timeout
@_cluster
@_json
def clear(
    tenant: str | None,
    tier: str,
    everything: bool,
    also_pinned: bool,
    timeout_s: float,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Remove chunks. Exit status 1 when some could not be removed."""
    if everything == (tenant is not None or bool(tier)):
        raise click.UsageError("say what to remove: --tenant and --tier, or --all for everything")
    body = {"tier": tier, "keep_pinned": not also_pinned, "timeout_s": timeout_s}
    if tenant is not None:
        body["tenant"] = tenant
    _tell_done("removed", _router(cluster).cache("clear", body), as_json=as_json)


class _Quota(click.Command):
    """A size below nothing is told as no size, rather than as an option that is not known."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raise ``RefusedError`` for an argument like ``-2 GB``."""
        for text in args:
            if _NEGATIVE.match(text):
                _bytes(text)
        return super().parse_args(ctx, args)


@cache.command(cls=_Quota)
@click.argument("tenant", required=False)
@click.argument("tier", required=False)
@click.argument("limit", required=False)
@_cluster
@_json
def quota(
    tenant: str | None, tier: str | None, limit: str | None, cluster: str | None, as_json: bool
) -> None:
    """Show what tenants may hold, or let TENANT hold LIMIT (`1 GB`, `none`) in TIER from now on.

    TENANT `*` is every tenant without a quota of its own. What is set here lasts until the cache
    server ends; quotas that last are in the cluster's YAML.
    """
    body: dict[str, Any] = {"tenant": tenant, "tier": tier or ""}
    if limit is not None:
        body["limit_bytes"] = None if limit == NO_BOUND else _bytes(limit)
    found = _router(cluster).cache("quota", body)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        print_quotas(found["tenants"])


def _router(cluster: str | None) -> RouterClient:
    files = chosen_cluster(cluster)
    record = files.record()
    if record is None or not files.is_running():
        raise click.exceptions.Exit(not_running(files.name))
    return RouterClient(files, record)


def _change(verb: str, done: str, options: dict[str, Any]) -> None:
    cluster, as_json, tier = (options.pop(name) for name in ("cluster", "as_json", "tier"))
    answer = _router(cluster).cache(verb, _chunks(options) | {"tier": tier})
    _tell_done(done, answer, as_json=as_json)


def _tell_done(done: str, answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        rest = f"; {answer['missing']} chunks are not" if answer["missing"] else ""
        amount = f"{answer['chunks']} chunks ({answer['tokens']} tokens, {size(answer['bytes'])})"
        click.echo(f"{done}: {amount}{rest}")
    if answer["missing"]:
        raise click.exceptions.Exit(EXIT_FAILED)


def _chunks(options: dict[str, Any]) -> dict[str, Any]:
    """The body that names the chunks."""
    texts = {
        name: options.pop(name)
        for name in ("prompt", "prompt_file", "messages_file", "tokens_file")
    }
    given = [name for name, value in texts.items() if value is not None]
    if len(given) != 1:
        raise click.UsageError(
            "name the prompt once: --prompt, --prompt-file, --messages or --tokens"
        )
    body = {name: value for name, value in options.items() if value is not None}
    if texts["prompt_file"] is not None:
        body["prompt"] = texts["prompt_file"].read()
    elif texts["prompt"] is not None:
        body["prompt"] = texts["prompt"]
    elif texts["tokens_file"] is not None:
        body["tokens"] = _token_ids(_json_in(texts["tokens_file"]))
    else:
        body |= _chat_of(_json_in(texts["messages_file"]))
    return body


def _chat_of(value: Any) -> dict[str, Any]:
    """The fields of a chat that count, from its messages or from a whole request."""
    chat = value if isinstance(value, dict) else {"messages": value}
    _list_in(chat.get("messages"), "--messages", "messages, or a chat request")
    return {name: chat[name] for name in _OF_A_CHAT if chat.get(name) is not None}


def _token_ids(value: Any) -> Any:
    for place, entry in enumerate(_list_in(value, "--tokens", "token ids")):
        if type(entry) is not int or not 0 <= entry < TOKEN_IDS:
            raise RefusedError(
                f"--tokens: entry {place} of the list is no token id: "
                f"{json.dumps(entry)[:SHOWN_CHARACTERS]}; give whole numbers, as in [1, 529, 30]"
            )
    return value


def _list_in(value: Any, option: str, what: str) -> Any:
    if not isinstance(value, list):
        raise RefusedError(f"{option}: the file must hold a JSON list of {what}")
    return value


def _json_in(file: IO[str]) -> Any:
    try:
        return json.load(file)
    except ValueError as error:
        raise RefusedError(f"{file.name} is no JSON: {error}") from error


def _bytes(text: str) -> object:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RefusedError(f"LIMIT: {error}; `{NO_BOUND}` is no bound") from error
