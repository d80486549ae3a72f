"""Clusters of which manifests are kept as golden files, with what is asked for beside the YAML."""

from __future__ import annotations

from splitserve.orchestrator.launch.kubernetes.options import Options

KEYS = "security: {api_keys: [{tenant: me, key_file: /home/me/key}]}\n"

MOCK = f"""
name: demo
engine: mock
model: {{path: mock}}
{KEYS}
prefill: {{replicas: 2, kv_cache_bytes: 16 MiB, transfer: {{transport: tcp}}}}
decode: {{kv_cache_bytes: 16 MiB, transfer: {{transport: tcp}}}}
"""

GPU = """
name: big
model: {path: /models/llama}
experimental_cuda: true
security:
  api_keys: [{tenant: a, key_env: KEY_OF_A}, {tenant: b, key_file: /keys/b}]
  tls: {cert_file: /c, key_file: /k, ca_file: /ca}
prefill:
  replicas: 2
  gpus: [[0, 1], [2, 3]]
  engine_args: {dtype: bfloat16, tensor_parallel_size: 2}
  env: {HF_TOKEN: hf_verysecret, VLLM_LOGGING_LEVEL: INFO}
decode:
  gpus: [[4]]
  engine_args: {dtype: bfloat16}
observability: {tracing: {otlp_endpoint: "http://collector.tracing.svc:4318"}}
"""

CACHED = """
name: cached
model: {path: owner/model}
security:
  secret_file: /home/me/secret
  api_keys: [{tenant: me, key_file: /home/me/key}]

prefill: {cpus: [[4, 5]], kv_cache_bytes: 4 GiB, transfer: {transport: tcp}}
decode: {cpus: [[6, 7]], kv_cache_bytes: 4 GiB, transfer: {transport: tcp}}
cache:
  tiers:
    - {type: cpu, capacity_bytes: 2 GiB}
    - {type: disk, capacity_bytes: 8 GiB}
    - {type: s3, url: "s3://bucket/prefix", options: {access_key_id: "${S3_ID}",
       secret_access_key: "${S3_KEY}", region: eu-central-1}}
  encrypt: true
  secret_file: /home/me/cache-secret
"""

LOCAL = f"""
name: pair
engine: mock
model: {{path: mock}}
{KEYS}
prefill: {{replicas: 2, kv_cache_bytes: 16 MiB, transfer: {{transport: local}}}}
decode: {{kv_cache_bytes: 16 MiB, transfer: {{transport: local}}}}
"""

ROUTERS = f"""
name: two
engine: mock
model: {{path: mock}}
router: {{replicas: 2, queue_limit_requests: 64}}
{KEYS}
prefill: {{kv_cache_bytes: 16 MiB, transfer: {{transport: tcp}}}}
decode: {{kv_cache_bytes: 16 MiB, transfer: {{transport: tcp}}}}
"""

_CPU = "registry.example/splitserve:1-cpu"
GOLDEN = {
    "mock": (MOCK, Options(image=_CPU)),
    "routers": (ROUTERS, Options(image=_CPU)),
    "gpu": (
        GPU,
        Options(
            namespace="serving",
            image="registry.example/splitserve:1-cuda",
            model_claim="models",
            model_memory_bytes=16 * 10**9,
            rdma=("rdma/hca", 1),
        ),
    ),
    "cached": (
        CACHED,
        Options(
            image=_CPU,
            model_memory_bytes=10**9,
            node_selector=(("splitserve", "yes"),),
            has_monitoring=False,
        ),
    ),
    "local": (LOCAL, Options(image=_CPU)),
}
