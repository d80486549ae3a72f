"""The section ``cache`` of the cluster YAML. What its keys must agree on is in
``cache_checks.py``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from splitserve.kv_transfer.cache.codecs.names import LOSS, CodecName, worst_of
from splitserve.orchestrator.config.fields import Bytes, Seconds, Section

AUTO_LOSSLESS: tuple[CodecName, ...] = ("bf16z",)
"""Among what `codec: auto` may choose where nothing may be lost."""


class TierConfig(Section):
    """One tier of the cache."""

    type: Literal["cpu", "disk", "redis", "mooncake", "s3"]
    """`cpu`: memory of the host that its engines share; `disk`: a folder; `redis`: Redis or Valkey;
    `mooncake`: a Mooncake Store; `s3`: an object store (S3, Google Cloud, Azure). `cpu` comes
    first, faster tiers before slower ones.
    """

    capacity_bytes: Bytes | None = None
    """Most bytes that the tier may hold. Required for `cpu` and `disk`; by default
    `redis`, `mooncake` and `s3` hold what the store itself allows.
    """

    eviction: Literal["lru", "s3fifo"] = "s3fifo"
    """What leaves a full tier: the chunks that were used longest ago, or those that were not used
    again soon (`s3fifo`: one long prompt does not push out what many share).
    """

    ttl_s: Seconds | None = None
    """Seconds after which a chunk that was not used is removed; by default never."""

    admission: Literal["always", "second_use", "never"] = "always"
    """Which chunks are written to this tier: each new one, those that are used a second time, or
    none (what is there is still read).
    """

    codec: Literal["raw", "bf16z", "int8", "int5z", "auto"] = "raw"
    """How chunks lie in this tier: as they are (`raw`), compressed to the bit (`bf16z`), or as
    integers that lose something (`int8`, half the bytes of bfloat16; `int5z`, less than a third).
    `auto` chooses by measured rates among `raw`, `bf16z` and, where `cache.quality` sets a limit,
    what `cache.quality.auto` names. `cpu` takes `raw` and `auto`.
    """

    path: str | None = Field(default=None, min_length=1)
    """`disk`: the folder, made when it does not exist; by default below the user's state folder."""

    url: str | None = Field(default=None, min_length=1)
    """`redis`: `redis://HOST:PORT/DB` or `rediss://`; `mooncake`: `mooncake://HOST:PORT`, its
    master; `s3`: `s3://BUCKET/PREFIX`, `gs://`, `az://`
    or `file:///FOLDER`. Credentials belong into environment variables of `splitserve up`, and
    `${NAME}` stands for one; a password in the URL is hidden in output, but lies in files of the
    user's state folder.
    """

    options: dict[str, str] = Field(default={})
    """Further settings of the store's client, such as `endpoint` or `region` for `s3`; for secrets
    write `${NAME}`, an environment variable of `splitserve up`.
    """


class QuotaConfig(Section):
    """What one tenant may hold in one tier."""

    tenant: str = Field(min_length=1)
    """A tenant of `security.api_keys`, or `*` for every one that no other quota names."""

    tier: str = Field(min_length=1)
    """The tier: its type, or `TYPE-2` for the second one of that type."""

    limit_bytes: Bytes
    """Bytes of chunks; the tenant's own oldest ones make room for its new ones."""


class QualityConfig(Section):
    """What lossy codecs may cost: `splitserve up` measures it with the model and refuses more;
    `splitserve node`, `cache-server` and `render kubernetes` refuse what was not measured.
    """

    text: str = Field(min_length=1)
    """File with text as the cluster's users write it, at least a few thousand words."""

    max_kl: float = Field(default=0.01, gt=0)
    """Most KL divergence per token, in nats, between the model's predictions with and without a
    codec.
    """

    tokens: int = Field(default=4096, ge=512)
    """Tokens of the text that are used."""

    compute: Literal["float32", "auto"] = "float32"
    """Type of the model's weights and activations while it is measured; `auto`: as they are stored,
    which takes less memory and adds a little noise.
    """

    auto: list[Literal["int8", "int5z"]] = Field(default=["int8"])
    """Lossy codecs among which `codec: auto` may choose, if they keep the limit; the one of them
    that loses most is part of every key, so another list starts an empty cache.
    """

    record: str | None = Field(default=None, min_length=1)
    """File with what was measured, which `up` and `splitserve cache quality` write, and from which
    every process knows that the limit is kept; by default `quality.json` in the cluster's folder
    below the user's state folder.
    """


class CacheConfig(Section):
    """The shared cache of KV: one server process per host, memory that all engines map, and tiers
    below it.
    """

    tiers: list[TierConfig] = Field(min_length=1)
    """Where chunks are kept, fastest first."""

    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens of one chunk, the unit that is stored and found; a multiple of `block_size`. Smaller
    chunks hit more of a prompt, larger ones load faster from slow tiers.
    """

    socket_path: str | None = Field(default=None, min_length=1)
    """Unix socket on which the cache server listens, in a folder of this user alone; by default in
    the cluster's folder below the user's state folder.
    """

    staging_bytes: Bytes = 256 * 2**20
    """Bytes of memory through which chunks pass when there is no `cpu` tier."""

    lookup_timeout_s: Seconds = 0.25
    """Seconds that a request waits for the answer what of its prompt is cached; after that it is
    computed.
    """

    load_timeout_s: Seconds = 30.0
    """Seconds that a request waits for its chunks; what has not come by then is computed."""

    write_queue_limit_bytes: Bytes = 256 * 2**20
    """Bytes of chunks that wait to be written to lower tiers; more are not written there."""

    save_generated: bool = True
    """Also keep the KV of answers, for the next turn of a chat."""

    save_limit_bytes: Bytes = 256 * 2**20
    """Bytes of KV, per tensor-parallel rank of an engine, that wait to be copied into the cache;
    more is not saved, so that serving is never slowed.
    """

    quality: QualityConfig | None = None
    """A limit on what lossy codecs cost, held at each start; by default none is measured."""

    lossy_codec: Literal["int8", "int5z"] | None = None
    """The codec that loses most in tiers that the cache server has and this YAML does not name, as
    in manifests for Kubernetes, whose nodes know the `cpu` tier alone. Leave it out elsewhere.
    """

    quotas: list[QuotaConfig] = Field(default=[])
    """Bounds per tenant and tier; none means that tenants share each tier freely."""

    encrypt: bool = False
    """Seal chunks in the tiers below `cpu` with AES-GCM, under a key per tenant. Needs a secret
    that outlives `up`: `cache.secret_file` or `security.secret_file`.
    """

    secret_file: str | None = None
    """File with the secret from which tenants' keys follow (at least 32 hex digits, readable by its
    owner only); by default they follow from the cluster secret.
    """

    @property
    def auto_codecs(self) -> tuple[CodecName, ...]:
        """Among what `codec: auto` may choose, those that lose least first."""
        lossy = () if self.quality is None else self.quality.auto
        return (*AUTO_LOSSLESS, *sorted(set(lossy), key=LOSS.__getitem__))

    @property
    def codecs(self) -> tuple[CodecName, ...]:
        """Every codec that some tier may use, those that lose least first."""
        found: set[CodecName] = set() if self.lossy_codec is None else {self.lossy_codec}
        for tier in self.tiers:
            if tier.codec != "auto":
                found.add(tier.codec)
            elif tier.type != "cpu":
                found.update(self.auto_codecs)
        return tuple(sorted(found, key=list(LOSS).index))

    @property
    def key_codec(self) -> CodecName:
        """The one that loses most, which is part of every key."""
        return worst_of(self.codecs)
