"""A split cluster and one plain vLLM server that are asked the same.

All engines have the same flags: prefix caching, LoRA, a tool parser, and a chat template that shows
tools and tool calls. The adapter ``both`` is loaded everywhere, ``on-prefill`` in the prefill pool
only, ``on-decode`` in the decode pool only; the plain engine has all three.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from end_to_end.conformance.compare import Reply
from support.lora_adapter import RANK, write_adapter
from support.plain_engine import PlainEngine
from support.split_client import Split, stop_split
from support.up_process import UpProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import aiohttp

BLOCK = 32
LAYERS = 8
MAX_LENGTH = 2048
"""Tokens of a prompt and its answer."""
START_LIMIT_S = 400.0
REQUEST_LIMIT_S = 60.0
"""A client that waits so long has met a hang."""
ADAPTERS = ("both", "on-prefill", "on-decode")

CLUSTER = """
name: conformance
allow_shared_devices: true
model: {{path: {model}, served_name: m}}
router: {{port: 0}}
prefill:
  cpus: [[0]]
  kv_cache_bytes: 100 MB
  env: &env {{VLLM_SERVER_DEV_MODE: "1", VLLM_ENABLE_RESPONSES_API_STORE: "1",
    SPLITSERVE_TRANSFER_LOG: {folder}/transfers.jsonl}}
  transfer: &transfer {{transport: local, lease_s: 15}}
  engine_args: &engine
    dtype: float32
    block_size: {block}
    max_model_len: {max_length}
    enforce_eager: true
    max_num_batched_tokens: 4096
    enable_prompt_tokens_details: true
    enable_auto_tool_choice: true
    tool_call_parser: hermes
    chat_template: {folder}/template.jinja
    structured_outputs_config: {{disable_any_whitespace: true, backend: xgrammar}}
    enable_lora: true
    max_lora_rank: {rank}
    lora_modules: [both={folder}/both, on-prefill={folder}/on-prefill]
decode:
  cpus: [[1]]
  kv_cache_bytes: 100 MB
  env: *env
  transfer: *transfer
  engine_args:
    <<: *engine
    lora_modules: [both={folder}/both, on-decode={folder}/on-decode]
"""

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] -%}
<tool_call>{{ call['function'] | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor %}
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool['function'] | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass
class Sides:
    """Both sides, and what asks them. A started one must be stopped or killed."""

    session: aiohttp.ClientSession
    folder: Path
    up: UpProcess
    plain: PlainEngine
    lives: dict[str, str] = field(default_factory=dict)
    """The incarnation with which each node of the cluster has begun."""
    _split: list[Split] = field(default_factory=list)

    @property
    def split(self) -> Split:
        """The cluster, once it serves."""
        return self._split[0]

    async def wait_until_ready(self, limit_s: float) -> None:
        """Both serve."""
        self.up.wait_until_serving(limit_s)
        self.plain.wait_until_ready(limit_s)
        self._split.append(Split(self.up, self.folder / "transfers.jsonl"))
        nodes = await self.split.nodes()
        self.lives.update({name: node["incarnation"] for name, node in nodes.items()})

    def stop(self) -> None:
        """Both have ended, and nothing of them is left."""
        self.plain.stop()
        stop_split(self.split)

    def kill(self) -> None:
        """Nothing of them lives."""
        self.up.close()

    async def ask(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[Reply, Reply]:
        """The answers of cluster and plain engine to one POST; ``body`` is sent as JSON, bytes as
        they are.
        """
        split, plain = await asyncio.gather(
            self.ask_split(path, body, headers), self.ask_plain(path, body, headers)
        )
        return split, plain

    async def ask_split(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The cluster's answer."""
        return await post(self.session, self.split.url + path, body, headers or {})

    async def ask_plain(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The plain engine's answer."""
        told = {**(headers or {}), **self.plain.headers}
        return await post(self.session, self.plain.url + path, body, told)

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """What the router knows of the request with that X-Request-Id; empty when it knows none."""
        return await timeline_of(self.session, self.split.url, request_id)


@dataclass
class OneCluster:
    """A cluster whose prefill engine, asked without a transfer, is the plain engine. A salt of its
    own keeps it from knowing the prompt because the cluster has been asked the same.
    """

    session: aiohttp.ClientSession
    split: Split
    engine_url: str

    async def ask(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[Reply, Reply]:
        """The answers of cluster and engine, one after the other."""
        url, told = self.split.url, headers or {}
        found = await post(self.session, url + path, {**body, "cache_salt": "split"}, told)
        url, told = self.engine_url, {**told, **self.split.key_of(self.engine_url)}
        right = await post(self.session, url + path, {**body, "cache_salt": "plain"}, told)
        return found, right

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """As of ``Sides``."""
        return await timeline_of(self.session, self.split.url, request_id)


async def timeline_of(
    session: aiohttp.ClientSession, router: str, request_id: str
) -> dict[str, Any]:
    """What a router knows of a request; empty when it knows none."""
    async with session.get(f"{router}/internal/timeline/{request_id}") as answer:
        found: dict[str, Any] = await answer.json() if answer.status == 200 else {}
    return found


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str]
) -> Reply:
    """One answer, read to its end."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {"Content-Type": "application/json", **headers}
    async with session.post(url, data=data, headers=told) as answer:
        return Reply(answer.status, answer.headers.get("content-type", ""), await answer.read())


def start_sides(model: Path, folder: Path, session: aiohttp.ClientSession) -> Sides:
    """Both sides, started at the same time and not ready yet."""
    for seed, name in enumerate(ADAPTERS):
        write_adapter(model, folder / name, seed=seed + 1)
    (folder / "template.jinja").write_text(TEMPLATE)
    cluster = folder / "cluster.yaml"
    values = {"model": model, "folder": folder, "block": BLOCK, "max_length": MAX_LENGTH}
    cluster.write_text(CLUSTER.format(**values, rank=RANK))
    up = UpProcess(cluster, folder)
    try:
        adapters = [f"{name}={folder}/{name}" for name in ADAPTERS]
        plain = PlainEngine(cluster, "prefill-0", model, up.mark, lora_modules=adapters)
    except BaseException:
        up.close()
        raise
    return Sides(session, folder, up, plain)
