"""The cluster YAML as model classes: what may be written, in which unit, and what each key changes.

The classes are strict (no silent conversion), closed (an unknown key is an error) and frozen. They
hold what one value can say about itself; what two keys must agree on is in ``checks.py``, what the
machine must offer in ``launch/checks``. ``docs/configuration.md`` is generated from the
docstrings here.

Names: a *pool* is ``prefill`` or ``decode``; its replicas are *nodes* called ``prefill-0``,
``prefill-1``, ``decode-0``, ...
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from splitserve.orchestrator.config.cache_schema import CacheConfig
from splitserve.orchestrator.config.fields import (
    Bytes,
    Cpu,
    Host,
    NonNegativeSeconds,
    Port,
    Seconds,
    Section,
    VariableName,
    VariableValue,
)
from splitserve.orchestrator.config.policy_schema import PolicyConfig
from splitserve.orchestrator.config.ray_schema import PlacementConfig, RayConfig
from splitserve.orchestrator.config.tls_schema import TlsConfig
from splitserve.orchestrator.config.tracing_schema import TracingConfig


class ModelConfig(Section):
    """Which model all nodes serve."""

    path: str = Field(min_length=1)
    """A Hugging Face folder, the name of a prepared model (`splitserve model list`) or a Hub id."""

    served_name: str | None = None
    """The name clients write in `model`; by default the last part of `path`."""

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class RouterConfig(Section):
    """The HTTP server that clients talk to, and its bounds."""

    host: Host = "127.0.0.1"
    """Address to listen on. Anything but a loopback address opens the service to the network: set
    `security.api_keys` then.
    """

    advertise_host: str = ""
    """Address or name by which agents and operators reach the router, when it is not the one it
    listens on: `0.0.0.0`, a Kubernetes service, NAT. Empty: the address it listens on.
    """

    port: Port = 8000
    """TCP port of the OpenAI API; 0 takes a free one at start. Routers that share an address take
    consecutive ones from this on.
    """

    replicas: int = Field(default=1, ge=1, le=16)
    """Number of routers, all of them for all nodes. They share no state: the bounds below are those
    of each, and one that ends takes only its own requests along.
    """

    hosts: list[Host] | None = None
    """Address or name of each router's machine, one per replica: it listens there and is found
    there. For routers on several machines, which are started one by one with `splitserve router
    --index`; takes the place of `host` and `advertise_host`.
    """

    max_body_bytes: Bytes = 32 * 2**20
    """Largest request body in bytes; a larger one gets status 413."""

    queue_limit_requests: int = Field(default=256, ge=1)
    """Requests that wait in the router for a free pair of nodes; the next one gets status 429 with
    `Retry-After`. When tenants share the queue, the 429 goes to the one that holds most of it.
    """

    queue_timeout_s: Seconds = 60.0
    """Seconds a request may wait in that queue before it gets status 503."""

    first_token_deadline_s: Seconds = 300.0
    """Seconds from dispatch to the first token of a streamed answer; after that the request ends
    with an error. Other answers have `request_deadline_s`.
    """

    request_deadline_s: Seconds = 3600.0
    """Seconds from arrival to the last token; after that the request ends with an error."""

    connect_timeout_s: Seconds = 5.0
    """Seconds to open a connection to an engine."""

    prefill_ahead_requests: int = Field(default=1, ge=0)
    """Prefill legs that may wait in a prefill node beside the ones it runs; more hides dispatch
    time, but reserves decode pages earlier.
    """

    prefill_batch_tokens: int = Field(default=2048, ge=0)
    """Prompt tokens that a prefill node may hold whatever the number of legs: short prompts are
    computed together in one engine step. Set it to the engines' `max_num_batched_tokens`; 0 counts
    legs only.
    """

    node_silence_limit_s: Seconds = 5.0
    """Seconds without a word from a node's agent (it speaks twice a second) after which the node
    gets no new work.
    """


class TransferConfig(Section):
    """How KV pages travel from this pool's nodes (prefill) or to them (decode)."""

    transport: Literal["nixl", "local", "tcp", "ucx"] = "nixl"
    """`nixl`: RDMA, NVLink or TCP through UCX; `local`: one copy between processes of one host;
    `tcp`: any host, no dependency; `ucx`: through ucxx. Both pools must name the same one.
    """

    stream_min_bytes: Bytes = 2**20
    """Bytes below which pages wait for more layers before they are written; a prompt with less KV
    than this goes in one piece. Small writes cost more per byte.
    """

    lease_s: Seconds = 30.0
    """Seconds a prefill node holds the KV of a finished prompt until the decode node acknowledges
    that it has landed; also how long a grant waits for its prefill request.
    """

    deadline_s: Seconds = 120.0
    """Seconds a decode node waits for a transfer to complete; after that it computes the prompt
    itself. Longer than the longest prefill.
    """

    retarget_wait_s: NonNegativeSeconds = 2.0
    """Seconds a decode node whose prefill node has failed waits for the router to name another one,
    before it computes the prompt itself.
    """

    fence_timeout_s: Seconds = 30.0
    """Seconds a prefill engine may owe a decode engine its word that it writes no more to pages
    which nobody wants; then it is killed and started again, since pages come back only with that
    word or with its end. Never needed with `tcp`.
    """

    quarantine_limit_bytes: Bytes = 256 * 2**20
    """Bytes of KV, per tensor-parallel rank of a decode node, that may wait for such a word
    together; beyond that the prefill engines that owe it longest are killed before
    `fence_timeout_s` ends. A quarter of `kv_cache_bytes` is a good value.
    """

    host: Host = "127.0.0.1"
    """Address on which the control channel between engines listens, one socket per tensor-parallel
    rank.
    """

    port_base: Port = 0
    """First control port; node i, rank r listens on `port_base + i * tensor_parallel_size + r`. 0
    takes free ports at start.
    """

    data_port_base: Port = 0
    """First port on which `tcp` and `local` receive pages, numbered like `port_base`; 0 takes a
    free one at each start of an engine. Fixed ports are for firewalls and port mappings.
    """


class EngineArgs(Section):
    """What the engine is started with. Keys not listed here are passed to the engine as
    `--kebab-case` flags; those that splitserve sets itself are refused.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, use_attribute_docstrings=True
    )

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of weights and activations. On CPUs without AVX-512 bf16 instructions `bfloat16` is
    emulated and tens of times slower. Equal in both pools.
    """

    kv_cache_dtype: str = "auto"
    """Type of the KV cache; `auto` is the model's `dtype`. Equal in both pools."""

    block_size: int = Field(default=128, ge=1)
    """Tokens per KV block. Equal in both pools; on CPU a multiple of 32."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus answer in tokens; by default what the model's config says."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks over which each engine splits the model's heads; the pools may differ."""

    enforce_eager: bool = True
    """Run without compilation and graphs: starts in under a minute; a little slower per step."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Requests that one engine computes at a time; by default the engine's own choice."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens per engine step: the size of a prefill chunk; by default the engine's own choice."""

    @property
    def passed_on(self) -> dict[str, Any]:
        """The keys that are not fields of this class, for the engine's command line."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the LoRA adapters in `lora_modules`: each is `NAME=PATH` or a mapping."""
        extra = self.passed_on
        modules = extra.get("lora_modules", extra.get("lora-modules")) or []
        names = []
        for module in modules if isinstance(modules, list) else [modules]:
            if isinstance(module, str) and not module.startswith("{"):
                names.append(module.partition("=")[0])
            elif isinstance(module, dict) and isinstance(module.get("name"), str):
                names.append(module["name"])
        return frozenset(names)


class PoolConfig(Section):
    """One pool of equal nodes."""

    replicas: int = Field(default=1, ge=1)
    """Number of nodes."""

    cpus: list[list[Cpu]] | None = None
    """CPU numbers of each node, one list per replica (`[[0], [1]]`); the node's whole process tree
    is pinned to them. Required for vLLM on CPU.
    """

    gpus: list[list[Annotated[int, Field(ge=0)]]] | None = None
    """GPU numbers of each node, one list per replica; needs `experimental_cuda: true`."""

    kv_cache_bytes: Bytes = 10**9
    """Bytes of KV cache per tensor-parallel rank of each node, as a number or `1 GB`, `512 MiB`.
    Without a limit an engine takes nearly all memory.
    """

    engine: Literal["vllm", "transformers"] | None = None
    """The engine of this pool, when it is another than the cluster's `engine`: KV of the two can be
    exchanged and cached together.
    """

    engine_args: EngineArgs = EngineArgs()
    """What the engines are started with."""

    env: dict[VariableName, VariableValue] = Field(default={})
    """Environment variables of the engines; they win over those that splitserve sets. Values of
    names with KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL are hidden in output.
    """

    hosts: list[Host] | None = None
    """Address or name of each node's machine, one per replica: the node listens there (HTTP,
    control channel, pages) and is reached there. For a cluster on several machines, whose nodes are
    started one by one with `splitserve node`; takes the place of `host`, `transfer.host` and
    `advertise_host`.
    """

    host: Host = "127.0.0.1"
    """Address on which the engines' HTTP servers listen; the router must reach it."""

    advertise_host: str = ""
    """Address by which the router and the other engines reach this pool's nodes (HTTP, control
    channel, `tcp`'s data), when it is not the one they listen on: behind NAT, in containers. Ports
    are the same on both sides. Empty: the addresses they listen on.
    """

    port_base: Port = 0
    """First engine port; node i takes `port_base + 2 * i` for HTTP and the next one, always on
    loopback, for its agent. 0 takes free ports at start.
    """

    transfer: TransferConfig = TransferConfig()
    """How KV pages travel."""

    startup_timeout_s: Seconds = 600.0
    """Seconds an engine may take until it is ready; then it is stopped and counts as failed."""

    placement: PlacementConfig | None = None
    """On which hosts the nodes run, with `launcher: ray`."""


class ApiKeyConfig(Section):
    """One key that clients may use. Exactly one of `key_file` and `key_env`."""

    tenant: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
    """Whom the key belongs to; tenants never share cached KV, and take turns when requests wait."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the waiting queue's turns and places that the tenant has beside others: 2 gets twice
    as much as 1. Equal for all keys of one tenant.
    """

    key_file: str | None = None
    """File that holds the key (surrounding blanks are ignored)."""

    key_env: str | None = None
    """Environment variable of `splitserve up` that holds the key."""

    @model_validator(mode="after")
    def _one_source(self) -> ApiKeyConfig:
        if (self.key_file is None) == (self.key_env is None):
            raise ValueError("give exactly one of key_file and key_env")
        return self


class SecurityConfig(Section):
    """Secrets and keys. Nothing here holds a secret itself, only where it is."""

    secret_file: str | None = None
    """File with the cluster secret (at least 32 hex digits, readable by its owner only); without it
    each `up` makes a new one.
    """

    tls: TlsConfig | None = None
    """Certificates for HTTPS; without this section HTTP is not encrypted."""

    api_keys: list[ApiKeyConfig] = Field(default=[])
    """Keys that clients must send as `Authorization: Bearer KEY`; none means that every client on
    the listening address is served.
    """


class ObservabilityConfig(Section):
    """Logs and measures."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of splitserve's own logs; `warning` and `error` leave out the router's line per
    request.
    """

    log_dir: str | None = None
    """Folder for one log file per process; by default below the user's state folder."""

    timeline_requests: int = Field(default=1024, ge=0, le=100_000)
    """Finished requests whose timeline the router keeps (`/internal/timeline/REQUEST_ID`; the
    quickstart shows one).
    """

    tracing: TracingConfig | None = None
    """Traces by OpenTelemetry; without this section there are none. Needs `pip install
    'splitserve[tracing]'`, which vLLM brings along.
    """


class SupervisionConfig(Section):
    """How dead processes are restarted, and how long a stop may take."""

    restart_delay_s: Seconds = 1.0
    """Seconds before the first restart of an engine, agent or router that died; doubled each time.
    """

    restart_delay_limit_s: Seconds = 30.0
    """Longest such delay in seconds."""

    restart_limit: int = Field(default=5, ge=0)
    """Restarts of one process within `restart_window_s`; one more and it stays down, and `up` says
    so.
    """

    restart_window_s: Seconds = 600.0
    """Seconds after which a restart no longer counts."""

    engine_silence_limit_s: Seconds = 60.0
    """Seconds without an answer from a ready engine's connector after which the engine counts as
    hung, is killed and started again.
    """

    drain_timeout_s: Seconds = 30.0
    """Seconds that running requests get to finish when `up` is asked to stop."""

    stop_timeout_s: Seconds = 10.0
    """Seconds an engine gets to end by itself before it is killed."""


class ClusterConfig(Section):
    """A whole cluster: one model, a router, a prefill pool and a decode pool."""

    name: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Name of the cluster for `status` and `down`; lower-case letters, digits, `.`, `_`, `-`."""

    engine: Literal["vllm", "transformers", "mock"] = "vllm"
    """`vllm`; `transformers`: small models by Hugging Face's library, without compilation, ready in
    seconds; or `mock`: no model, real bytes; its answers depend on every page received.
    """

    launcher: Literal["local", "ray"] = "local"
    """What `up` starts the processes with: `local`, as its children on this machine; `ray`, as
    actors on the hosts of a Ray cluster.
    """

    ray: RayConfig | None = None
    """How `launcher: ray` uses the Ray cluster."""

    model: ModelConfig
    """Which model all nodes serve."""

    router: RouterConfig = RouterConfig()
    """The HTTP server that clients talk to."""

    prefill: PoolConfig = PoolConfig()
    """The nodes that compute prompts."""

    decode: PoolConfig = PoolConfig()
    """The nodes that generate."""

    cache: CacheConfig | None = None
    """The shared cache of KV, from which prefill takes every prefix that some node has computed
    before; without this section there is none.
    """

    policy: PolicyConfig = PolicyConfig()
    """Decisions of the router."""

    security: SecurityConfig = SecurityConfig()
    """Secrets and keys."""

    observability: ObservabilityConfig = ObservabilityConfig()
    """Logs and measures."""

    supervision: SupervisionConfig = SupervisionConfig()
    """Restarts and stops."""

    experimental_cuda: bool = False
    """Allow nodes with `gpus`. Splitting on CUDA has not been shown to be exact yet; with this set
    you accept that.
    """

    allow_shared_devices: bool = False
    """Allow two nodes to name the same CPU or GPU. They then compute in turns: for trying things on
    small machines.
    """

    def engine_of(self, pool: str) -> str:
        """The engine of the pool's nodes."""
        return self.pool(pool).engine or self.engine

    def pool(self, pool: str) -> PoolConfig:
        """The pool ``prefill`` or ``decode``."""
        return {"prefill": self.prefill, "decode": self.decode}[pool]
