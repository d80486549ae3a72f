"""Ports, addresses, and what a proxy would catch."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from splitserve.orchestrator.config import router_url
from splitserve.orchestrator.config.cache_checks import shown_url
from splitserve.orchestrator.config.checks import fixed_ports, is_loopback, port_overlaps
from splitserve.orchestrator.config.nodes import POOLS, router_hosts
from splitserve.orchestrator.launch.checks.subject import ROUTER, Subject
from splitserve.orchestrator.launch.finding import Finding, failure, told, warning
from splitserve.orchestrator.launch.ports import free_run, is_free

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.finding import Problem

REACH_TIMEOUT_S = 2.0
"""To connect to an advertised address."""
RESOLVE_TIMEOUT_S = 3.0
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NONCE_BYTES = 16
_DEVICE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def ports(subject: Subject) -> Finding:
    """Fixed ports are given once, and nobody listens on them."""
    config, uses = subject.config, fixed_ports(subject.config)
    if subject.here is not None:
        uses = [use for use in uses if use[2].partition(" ")[0].partition(".")[0] in subject.here]
    problems = list(told(port_overlaps(config)))
    first, last = _outgoing_ports()
    for port, host, use in dict.fromkeys(uses):
        if first <= port <= last:
            problems.append(
                warning(
                    _key_of(use),
                    f"port {port} is one that this machine takes for outgoing connections "
                    f"({first} to {last}), and may be taken at any start",
                    f"choose one below {first}, or 0",
                )
            )
        try:
            free = subject.running is not None or port > 65535 or is_free(port, host)
        except OSError:
            continue  # Told by `addresses`.
        if not free:
            whose = f" for {use.partition(' (')[0]}" if "(" in use else ""
            what = f"port {port} on {host}{whose} is in use{_user_of(port)}"
            fix = "stop that, or choose another port (0 takes a free one)"
            problems.append(failure(_key_of(use), what, fix))
    return Finding("ports", f"{len(uses)} fixed ports", tuple(problems))


def addresses(subject: Subject) -> Finding:
    """This machine can listen where it should, and is found where it says."""
    config = subject.config
    problems = [*_foreign_hosts(subject), *_foreign_variables(config), *_unreachable(config)]
    told_of = [
        f"{pool} as {config.pool(pool).advertise_host}"
        for pool in POOLS
        if config.pool(pool).advertise_host
    ]
    hosts = sorted(set(_hosts(subject).values()))
    detail = f"listens on {', '.join(hosts)}"
    return Finding("addresses", "; ".join([detail, *told_of]), tuple(problems))


def proxies(subject: Subject) -> Finding:
    """No proxy of the environment stands between processes of this machine."""
    check, found = "proxies", proxies_in(subject.environ)
    urls = [url for url in _own_urls(subject.config) if _is_caught(url, found)]
    if not urls:
        is_set = any(scheme != "no" for scheme in found)
        return Finding(check, "loopback goes past the proxy" if is_set else "none set")
    names = sorted(n for n, v in subject.environ.items() if v and n.lower() in _PROXIES)
    servers = sorted({shown_url(url) for scheme, url in found.items() if scheme != "no"})
    hosts = sorted({"127.0.0.1", "localhost", *(urlsplit(url).hostname or "" for url in urls)})
    problem = warning(
        (*names, "NO_PROXY"),
        f"clients that heed it (OpenAI's, and the cache's for s3) would send {', '.join(urls)} to "
        f"the proxy {', '.join(servers)}",
        f"add {','.join(hosts)} to NO_PROXY",
    )
    return Finding(check, f"set: {', '.join(names)}", (problem,))


def proxies_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Proxies by scheme, and ``no`` for what goes without, as Python's urllib and httpx read
    them.
    """
    found = {}
    for name, value in environ.items():
        if value and name.lower() in (*_PROXIES, "no_proxy"):
            scheme = name.lower().removesuffix("_proxy")
            if name.islower() or scheme not in found:
                found[scheme] = value
    return found


def _own_urls(config: ClusterConfig) -> list[str]:
    """Where processes of this machine talk to each other by HTTP."""
    port = config.router.port
    urls = [router_url(config) if port else router_url(config).removesuffix(":0")]
    for tier in config.cache.tiers if config.cache is not None else ():
        endpoint = tier.options.get("endpoint", "")
        host = urlsplit(endpoint).hostname or ""
        if host and is_loopback(host):
            urls.append(endpoint)
    return urls


def _is_caught(url: str, found: dict[str, str]) -> bool:
    parts = urlsplit(url)
    has_proxy = parts.scheme in found or "all" in found
    return has_proxy and not _is_excepted(parts.hostname or "", found.get("no", ""))


def _is_excepted(host: str, exceptions: str) -> bool:
    """Whether ``NO_PROXY`` names the host: itself, a domain of it, its network, or ``*``."""
    for entry in filter(None, (part.strip().lstrip(".") for part in exceptions.split(","))):
        if entry in ("*", host) or host.endswith(f".{entry}"):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry):
                return True
        except ValueError:
            continue
    return False


def _hosts(subject: Subject) -> dict[str, str]:
    """Where something of this machine listens, by key."""
    hosts: dict[str, str] = {}
    if subject.has_router:
        several = subject.config.router.hosts is not None
        for index, host in enumerate(router_hosts(subject.config)):
            hosts[f"router.hosts[{index}]" if several else "router.host"] = host
    for node in subject.nodes:
        if node.settings.hosts is not None:
            hosts[f"{node.pool}.hosts[{node.index}]"] = node.host
        else:
            hosts |= {
                f"{node.pool}.host": node.host,
                f"{node.pool}.transfer.host": node.transfer_host,
            }
    return hosts


def members_here(config: ClusterConfig) -> frozenset[str] | None:
    """What of a cluster on several machines runs on this one, by the addresses in ``hosts``; None
    for a cluster that names none, or all of which is here; of one on Ray nothing.
    """
    if config.launcher == "ray":
        return frozenset()
    everything = Subject(config, {})
    routers = router_hosts(config)
    own = next((host for host in routers if _is_of_this_machine(host)), routers[0])
    places = {ROUTER: own} | {node.name: node.host for node in everything.nodes}
    here = frozenset(name for name, host in places.items() if _is_of_this_machine(host))
    names_hosts = config.router.hosts is not None or any(
        config.pool(pool).hosts is not None for pool in POOLS
    )
    return here if names_hosts and len(here) < len(places) else None


def _is_of_this_machine(host: str) -> bool:
    try:
        is_free(0, host)
    except OSError:
        return False
    return True


def _foreign_hosts(subject: Subject) -> Iterator[Problem]:
    """Addresses on which nothing can listen here, whatever the port."""
    for key, host in _hosts(subject).items():
        try:
            is_free(0, host)
        except OSError as error:
            fix = "use an address that `ip addr` lists, or 127.0.0.1"
            if ".hosts[" in key:
                name = key.replace(".hosts[", "-").rstrip("]")
                fix = f"start the node there (`splitserve node {name}`), or {fix}"
            yield failure(
                key, f"this machine cannot listen on {host} ({error.strerror or error})", fix
            )


def _foreign_variables(config: ClusterConfig) -> Iterator[Problem]:
    """Addresses and devices that a pool's ``env`` names in place of splitserve's own."""
    devices = set(psutil.net_if_addrs())
    for pool in POOLS:
        env = config.pool(pool).env
        try:
            if "VLLM_HOST_IP" in env:
                is_free(0, env["VLLM_HOST_IP"])
        except OSError as error:
            yield failure(
                f"{pool}.env.VLLM_HOST_IP",
                f"this machine cannot listen on {env['VLLM_HOST_IP']} ({error.strerror or error})",
                "remove it: an engine's processes talk by loopback",
            )
        for name in _DEVICE_VARIABLES:
            if name in env and env[name] not in devices:
                yield failure(
                    f"{pool}.env.{name}",
                    f"this machine has no network device {env[name]!r}; it has "
                    f"{', '.join(sorted(devices))}",
                    "remove it: an engine's processes talk by loopback",
                )


def _unreachable(config: ClusterConfig) -> Iterator[Problem]:
    for pool in POOLS:
        settings = config.pool(pool)
        if not settings.advertise_host:
            continue
        why = reach_obstacle(
            settings.advertise_host, settings.transfer.host, settings.transfer.port_base
        )
        if why:
            yield failure(
                f"{pool}.advertise_host",
                f"the router and the other engines would not find {pool} nodes at "
                f"{settings.advertise_host}: {why}",
                f"name an address by which this machine reaches itself and that leads to "
                f"{pool}.transfer.host {settings.transfer.host}, or leave it out",
            )


def reach_obstacle(advertised: str, host: str, port: int) -> str:
    """Why a listener on ``host`` is not found at ``advertised``; empty when it is.

    One is opened for the moment, on a port that an engine might get (0: any that ``up`` gives).
    """
    address = _resolved(advertised)
    if address is None:
        return "the name has no address"
    family = socket.AF_INET6 if ":" in (_resolved(host) or "") else socket.AF_INET
    nonce = secrets.token_bytes(_NONCE_BYTES)
    with socket.socket(family) as listener:
        # Else what is left of the connection keeps the engine from this port for a minute
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port or free_run([host])))
            listener.listen(1)
        except OSError:
            return ""  # Told of the host or of the port itself.
        listener.settimeout(REACH_TIMEOUT_S)
        port = listener.getsockname()[1]
        try:
            with socket.create_connection((address, port), REACH_TIMEOUT_S) as asking:
                answering, _ = listener.accept()
                with answering:
                    answering.sendall(nonce)
                    asking.settimeout(REACH_TIMEOUT_S)
                    heard = asking.recv(_NONCE_BYTES, socket.MSG_WAITALL)
                    asking.close()
                    answering.settimeout(REACH_TIMEOUT_S)
                    answering.recv(1)  # Who closes first is the one that remembers
        except TimeoutError:
            return f"no answer from {address} in {REACH_TIMEOUT_S:g} s"
        except OSError as error:
            return f"{address}: {error.strerror or error}"
    return "" if heard == nonce else f"somebody else answers at {address}"


def _resolved(host: str) -> str | None:
    """An address of the host; None when it has none, or the resolver takes too long."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        pool.shutdown(wait=False)
        try:
            return str(asked.result(RESOLVE_TIMEOUT_S)[0][4][0])
        except (OSError, TimeoutError):
            return None


def _outgoing_ports() -> tuple[int, int]:
    try:
        first, last = map(int, _OUTGOING.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999
    return first, last


def _key_of(use: str) -> str:
    """``prefill.port_base`` of ``prefill-0 HTTP (prefill.port_base)``."""
    return use.rpartition("(")[2].rstrip(")")


def _user_of(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or tuple(connection.laddr)[1:2] != (port,):
            continue
        if connection.pid is None:
            return ""
        try:
            return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
        except psutil.Error:
            return ""
    return ""
