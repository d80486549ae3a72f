"""``splitserve render kubernetes``: manifests of a cluster, to look at, keep and apply."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from splitserve.orchestrator.config import ConfigError, load
from splitserve.orchestrator.config.fields import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_LABEL = re.compile(r"([A-Za-z0-9./_-]+)=([A-Za-z0-9._-]*)")
_DEVICES = re.compile(r"([a-z0-9.-]+/[A-Za-z0-9._-]+)=([1-9][0-9]*)")


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        size = parse_bytes(int(value) if value is not None and value.isdigit() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return size if isinstance(size, int) and size > 0 else None


def _pairs(pattern: re.Pattern[str], form: str) -> Callable[..., tuple[tuple[str, str], ...]]:
    def read(
        context: click.Context, option: click.Parameter, value: tuple[str, ...]
    ) -> tuple[tuple[str, str], ...]:
        found = [pattern.fullmatch(text) for text in value]
        for text, match in zip(value, found, strict=True):
            if match is None:
                raise click.BadParameter(f"{text!r} is not of the form {form}")
        return tuple((match[1], match[2]) for match in found if match is not None)

    return read


@click.group()
def render() -> None:
    """Write a cluster down for other launchers."""


@render.command()
@click.argument("cluster")
@click.option("--out", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path),
    help="Write a file per part there; without it everything goes to standard output.")  # fmt: skip
@click.option("--image", default="", help="Of all containers; by default splitserve:VERSION-cpu, "
    "or -cuda where nodes have GPUs.")  # fmt: skip
@click.option("--namespace", default="default", show_default=True, help="Of all objects.")
@click.option("--model-claim", default="", metavar="NAME", help="PersistentVolumeClaim to mount "
    "at model.path, for reading.")  # fmt: skip
@click.option("--model-host-path", default="", metavar="FOLDER", help="Folder of every host to "
    "mount there instead.")  # fmt: skip
@click.option("--model-memory", callback=_size, metavar="SIZE", help="Memory of one engine's "
    "weights (16GB), where the model is not on this machine.")  # fmt: skip
@click.option("--node-selector", multiple=True, callback=_pairs(_LABEL, "KEY=VALUE"),
    metavar="KEY=VALUE", help="Label of the hosts for nodes and cache servers.")  # fmt: skip
@click.option("--rdma", multiple=True, callback=_pairs(_DEVICES, "RESOURCE=COUNT"),
    metavar="RESOURCE=COUNT", help="RDMA devices of each node (rdma/hca=1).")  # fmt: skip
@click.option("--monitoring-namespace", default="monitoring", show_default=True,
    help="Where Prometheus runs; it may reach engines' metrics.")  # fmt: skip
@click.option("--no-monitoring", is_flag=True, help="No PodMonitor and no PrometheusRule: the "
    "Prometheus Operator is not there.")  # fmt: skip
def kubernetes(
    cluster: str,
    out: Path | None,
    image: str,
    namespace: str,
    model_claim: str,
    model_host_path: str,
    model_memory: int | None,
    node_selector: tuple[tuple[str, str], ...],
    rdma: tuple[tuple[str, str], ...],
    monitoring_namespace: str,
    no_monitoring: bool,
) -> None:
    """Print Kubernetes manifests of the cluster YAML CLUSTER. They hold no secret; those that have
    to be there are named at the end, on standard error.
    """
    from splitserve.orchestrator.launch.kubernetes.options import Options
    from splitserve.orchestrator.launch.kubernetes.render import render, to_yaml
    from splitserve.orchestrator.launch.kubernetes.secrets import wanted_secrets

    config = load(cluster)
    if len(rdma) > 1:
        raise click.BadParameter("give one kind of device", param_hint="--rdma")
    options = Options(
        namespace=namespace,
        image=image,
        model_claim=model_claim,
        model_host_path=model_host_path,
        model_memory_bytes=model_memory,
        node_selector=node_selector,
        rdma=(rdma[0][0], int(rdma[0][1])) if rdma else None,
        monitoring_namespace=monitoring_namespace,
        has_monitoring=not no_monitoring,
    )
    try:
        files = render(config, options)
    except ConfigError as error:
        raise ConfigError(error.problems, cluster) from error
    if out is None:
        everything = [manifest for manifests in files.values() for manifest in manifests]
        click.echo(to_yaml(everything), nl=False)
    else:
        out.mkdir(parents=True, exist_ok=True)
        for number, (name, manifests) in enumerate(files.items()):
            (out / f"{number}0-{name}.yaml").write_text(to_yaml(manifests), encoding="utf-8")
        click.echo(f"wrote {len(files)} files to {out}; apply them with kubectl apply -f {out}")
    for secret, keys in wanted_secrets(files).items():
        click.echo(f"# needs Secret {namespace}/{secret} with {', '.join(keys)}", err=True)
