"""The cluster YAML: its classes (``schema``), how it is read (``loading``), what it says about
nodes and secrets.

Most callers need ``load(path_or_name) -> ClusterConfig``, ``load_resolved(path)`` in a process that
``up`` started, and ``nodes(config)``.
"""

from splitserve.orchestrator.config.autotune_schema import AutotuneConfig
from splitserve.orchestrator.config.cache_schema import CacheConfig, QuotaConfig, TierConfig
from splitserve.orchestrator.config.credentials import (
    SECRET_ENV,
    SECRET_FILE_ENV,
    cache_secret,
    cluster_secret,
    secret_for,
    secret_variables,
    shared_secret,
    tenant_tag,
    tenants_by_key,
)
from splitserve.orchestrator.config.errors import ConfigError
from splitserve.orchestrator.config.loading import (
    builtin_names,
    dump_resolved,
    load,
    load_resolved,
    load_with_contradictions,
    parse,
)
from splitserve.orchestrator.config.nodes import (
    NodeConfig,
    for_router,
    node,
    nodes,
    router_url,
    router_urls,
)
from splitserve.orchestrator.config.policy_schema import ConditionalConfig, PolicyConfig
from splitserve.orchestrator.config.ray_schema import PlacementConfig, RayConfig
from splitserve.orchestrator.config.schema import (
    ApiKeyConfig,
    ClusterConfig,
    EngineArgs,
    ModelConfig,
    ObservabilityConfig,
    PoolConfig,
    RouterConfig,
    SecurityConfig,
    SupervisionConfig,
    TransferConfig,
)
from splitserve.orchestrator.config.tls_schema import TlsConfig

__all__ = [
    "SECRET_ENV",
    "SECRET_FILE_ENV",
    "ApiKeyConfig",
    "AutotuneConfig",
    "CacheConfig",
    "ClusterConfig",
    "ConditionalConfig",
    "ConfigError",
    "EngineArgs",
    "ModelConfig",
    "NodeConfig",
    "ObservabilityConfig",
    "PlacementConfig",
    "PolicyConfig",
    "PoolConfig",
    "QuotaConfig",
    "RayConfig",
    "RouterConfig",
    "SecurityConfig",
    "SupervisionConfig",
    "TierConfig",
    "TlsConfig",
    "TransferConfig",
    "builtin_names",
    "cache_secret",
    "cluster_secret",
    "dump_resolved",
    "for_router",
    "load",
    "load_resolved",
    "load_with_contradictions",
    "node",
    "nodes",
    "parse",
    "router_url",
    "router_urls",
    "secret_for",
    "secret_variables",
    "shared_secret",
    "tenant_tag",
    "tenants_by_key",
]
