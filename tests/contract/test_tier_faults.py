"""Stores that are down, stand still, come back empty, or take nobody's word: Redis, Mooncake and
S3.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID
from support.chunks import empty_like, make_chunk, verify
from support.mooncake_store import MooncakePlace
from support.store_servers import START_DEADLINE_S, S3Server, StoreServer, redis_server

from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers import redis as redis_tier
from splitserve.kv_transfer.cache.tiers import registry
from splitserve.kv_transfer.cache.tiers.base import (
    ReadOutcome,
    Tier,
    TierConfigError,
    TierUnavailableError,
    WriteOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIMEOUT_S = 0.3
HASTY = {"timeout_s": str(TIMEOUT_S), "connect_timeout_s": str(TIMEOUT_S)}
POLL_S = 0.01
SLACK_S = 15.0
"""What a loaded machine adds to a timeout; far below what libraries wait by default."""
PASSWORD = "p@ss:w/rd"


class Place(Protocol):
    """A server, and tiers on it."""

    server: StoreServer

    def tier(self, **changes: Any) -> Tier:
        """With the right credentials, unless changed."""

    def renew(self) -> None:
        """The killed server runs again, and holds nothing."""


class RedisPlace:
    def __init__(self, port: int, folder: Path) -> None:
        self.server = redis_server(port, folder, "--requirepass", PASSWORD)

    def tier(self, **changes: Any) -> Tier:
        options = {"password": PASSWORD, **changes.pop("options", {})}
        url = changes.pop("url", f"redis://127.0.0.1:{self.server.port}/3")
        return registry.create(TierSettings(type="redis", url=url, options=options, **changes))

    def renew(self) -> None:
        self.server.start()


class S3Place:
    def __init__(self, port: int, folder: Path) -> None:
        self.s3 = S3Server(port, folder)
        self.server = self.s3
        self.s3.make_bucket("chunks")

    def tier(self, **changes: Any) -> Tier:
        options = {"endpoint": self.s3.endpoint, "access_key": "me", "secret_key": "mine"}
        options |= {"region": "us-east-1", **changes.pop("options", {})}
        url = changes.pop("url", "s3://chunks/here")
        return registry.create(TierSettings(type="s3", url=url, options=options, **changes))

    def renew(self) -> None:
        self.server.start()
        self.s3.make_bucket("chunks")


@pytest.fixture(scope="module")
def mooncake_place(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MooncakePlace]:
    place = MooncakePlace(free_port, tmp_path_factory.mktemp("mooncake"))
    yield place
    place.master.close()


@pytest.fixture(scope="module")
def redis_place(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisPlace]:
    place = RedisPlace(free_port(), tmp_path_factory.mktemp("redis"))
    yield place
    place.server.kill()


@pytest.fixture(scope="module")
def s3_place(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Place]:
    place = S3Place(free_port(), tmp_path_factory.mktemp("s3"))
    yield place
    place.server.kill()


@pytest.fixture(params=["redis", "mooncake", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


def until(call: Callable[[], bool]) -> None:
    """It is true, though on a loaded machine not with the first try."""
    end = time.monotonic() + START_DEADLINE_S
    while True:
        with suppress(TierUnavailableError):
            if call():
                return
        assert time.monotonic() < end, "it never is"
        time.sleep(POLL_S)


@pytest.fixture
def tier(place: Place) -> Iterator[Tier]:
    """Checked, with short timeouts."""
    made = place.tier(options=HASTY)
    until(lambda: made.check() is None)
    yield made
    made.close()


def test_a_store_that_stands_still_costs_its_timeout(place: Place, tier: Tier) -> None:
    """It takes connections and answers nothing: every call ends soon with what, where and what to
    do. When it goes on, so does the tier.
    """
    chunk = make_chunk(1)
    calls: list[Callable[[], Any]] = [
        lambda: list(tier.read([empty_like(chunk)])),
        lambda: tier.write([chunk.buffers]),
        lambda: tier.contains([chunk.key]),
        lambda: tier.remove([chunk.key]),
        tier.check,
    ]
    place.server.stand_still()
    try:
        for call in calls:
            began = time.monotonic()
            with pytest.raises(TierUnavailableError, match="cannot be reached"):
                call()
            assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    finally:
        place.server.go_on()
    buffers = empty_like(chunk)
    until(lambda: tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN])
    until(lambda: list(tier.read([buffers])) == [(0, ReadOutcome.HIT)])
    assert verify(buffers) == chunk.header


def test_a_store_that_comes_back_empty(place: Place) -> None:
    """While it is down calls fail at once; afterwards what it had is absent, and can be written."""
    tier, chunk = place.tier(), make_chunk(2)
    tier.write([chunk.buffers])
    place.server.kill()
    try:
        for _ in range(2):
            with pytest.raises(TierUnavailableError, match="cannot be reached"):
                list(tier.read([empty_like(chunk)]))
    finally:
        place.renew()
    assert list(tier.read([empty_like(chunk)])) == [(0, ReadOutcome.ABSENT)]
    assert tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN]
    assert tier.contains([chunk.key]) == [True]
    tier.close()


def test_no_store_at_all(place: Place, free_port: Callable[[], int]) -> None:
    """Start-up is told that nobody listens there."""
    port = free_port()
    options = {"endpoint": f"http://127.0.0.1:{port}"} if isinstance(place, S3Place) else {}
    kind = "redis" if isinstance(place, RedisPlace) else "mooncake"
    changes: dict[str, Any] = {} if options else {"url": f"{kind}://127.0.0.1:{port}"}
    tier = place.tier(options=options, **changes)
    with pytest.raises(TierUnavailableError, match="cannot be reached"):
        tier.check()
    tier.close()


def test_a_tier_that_only_reads_writes_nothing(redis_place: RedisPlace, s3_place: S3Place) -> None:
    """``admission: never`` is checked without the right to write."""
    client = redis.Redis(port=redis_place.server.port, password=PASSWORD, socket_timeout=SLACK_S)
    client.acl_setuser(
        "reader",
        enabled=True,
        passwords=["+pw"],
        keys=["*"],
        categories=["+@read", "+@transaction"],
    )
    options = {"username": "reader", "password": "pw"}
    for tier in (
        redis_place.tier(
            admission="never", url=f"redis://127.0.0.1:{redis_place.server.port}", options=options
        ),
        s3_place.tier(admission="never"),
    ):
        tier.check()
        assert tier.contains([bytes(32)]) == [False]
        tier.close()
    writer = redis_place.tier(url=f"redis://127.0.0.1:{redis_place.server.port}", options=options)
    with pytest.raises(TierConfigError, match="refuses the credentials"):
        writer.check()
    client.acl_deluser("reader")
    client.close()
    writer.close()


def test_the_rights_that_a_user_needs(
    redis_place: RedisPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the documentation names are enough for everything."""
    monkeypatch.setattr(redis_tier, "WHOLE_BYTES", 60_000)
    client = redis.Redis(port=redis_place.server.port, password=PASSWORD, socket_timeout=SLACK_S)
    rights = ["+@read", "+@write", "+@transaction", "+@connection"]
    client.acl_setuser(
        "worker", enabled=True, passwords=["+pw"], keys=["*"], categories=rights, commands=["+info"]
    )
    tier = redis_place.tier(
        options={"username": "worker", "password": "pw"}, capacity_bytes=1_000_000
    )
    chunk = make_chunk(70)
    tier.check()
    assert tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN]
    assert list(tier.read([empty_like(chunk)])) == [(0, ReadOutcome.HIT)]
    assert tier.free_bytes() is None
    assert tier.remove([chunk.key]) == 1
    client.acl_deluser("worker")
    client.close()
    tier.close()


@pytest.mark.parametrize(
    "options", [{"password": "incorrect"}, {"password": ""}, {"username": "who"}]
)
def test_wrong_passwords(redis_place: RedisPlace, options: dict[str, str]) -> None:
    """An error of the configuration, which does not tell the password."""
    tier = redis_place.tier(options=options)
    with pytest.raises(TierConfigError, match=r"refuses the credentials.*correct") as caught:
        tier.check()
    assert PASSWORD not in str(caught.value)
    assert "incorrect" not in str(caught.value)
    tier.close()


def test_a_password_in_the_url(redis_place: RedisPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out with escapes, or as a variable whose value needs none."""
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
    for text in ("p%40ss%3Aw%2Frd", "${STORE_PASSWORD}"):
        url = f"redis://default:{text}@127.0.0.1:{redis_place.server.port}/2"
        tier = redis_place.tier(url=url, options={"password": ""})
        tier.check()
        tier.close()


def test_a_database_that_does_not_exist(redis_place: RedisPlace) -> None:
    """Redis has sixteen."""
    tier = redis_place.tier(url=f"redis://127.0.0.1:{redis_place.server.port}/99")
    with pytest.raises(TierConfigError, match="DB index is out of range"):
        tier.check()
    tier.close()


def test_more_capacity_than_maxmemory(redis_place: RedisPlace) -> None:
    """Start-up names both numbers; without a limit it cannot know."""
    client = redis.Redis(port=redis_place.server.port, password=PASSWORD, socket_timeout=SLACK_S)
    tier = redis_place.tier(capacity_bytes=200_000_000)
    tier.check()
    assert tier.free_bytes() is None
    client.config_set("maxmemory", 100_000_000)
    with pytest.raises(TierConfigError, match=r"200000000 bytes.*maxmemory is 100000000"):
        tier.check()
    assert 50_000_000 < (tier.free_bytes() or 0) < 100_000_000
    client.config_set("maxmemory", 0)
    client.close()
    tier.close()


def test_chunks_expire(redis_place: RedisPlace) -> None:
    """``ttl_s`` is told to the server."""
    tier = redis_place.tier(ttl_s=1000.0)
    chunk = make_chunk(3)
    tier.write([chunk.buffers])
    client = redis.Redis(
        port=redis_place.server.port, db=3, password=PASSWORD, socket_timeout=SLACK_S
    )
    assert 990_000 < client.pttl(f"splitserve:{chunk.key.hex()}") <= 1_000_000
    client.close()
    tier.close()


def test_a_value_of_another_type(redis_place: RedisPlace) -> None:
    """Somebody has a list under a chunk's name: broken, and gone."""
    tier = redis_place.tier()
    chunk, other = make_chunk(4), make_chunk(5)
    client = redis.Redis(
        port=redis_place.server.port, db=3, password=PASSWORD, socket_timeout=SLACK_S
    )
    client.rpush(f"splitserve:{chunk.key.hex()}", b"1", b"2")
    tier.write([other.buffers])
    outcomes = dict(tier.read([empty_like(chunk), empty_like(other)]))
    assert outcomes == {0: ReadOutcome.BROKEN, 1: ReadOutcome.HIT}
    assert client.exists(f"splitserve:{chunk.key.hex()}") == 0
    client.close()
    tier.close()


class Impostor:
    """Accepts connections and answers the first command with these bytes, some at a time."""

    def __init__(self, answer: bytes, pause_s: float = 0.0) -> None:
        self._answer, self._pause_s = answer, pause_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        peer, _ = self._socket.accept()
        with peer:
            peer.recv(65_536)
            try:
                for at in range(len(self._answer)):
                    peer.sendall(self._answer[at : at + 1])
                    if self._ended.wait(self._pause_s):
                        return
                self._ended.wait(SLACK_S)
            except OSError:
                return  # the tier has hung up

    def close(self) -> None:
        self._ended.set()
        self._thread.join(SLACK_S)
        self._socket.close()


@pytest.mark.parametrize(
    ("answer", "pause_s", "error", "said"),
    [
        (b"$49152\r\n" + b"x" * 5000, 0.01, TierUnavailableError, "no answer in time"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0.0, TierConfigError, "is no Redis"),
        (b"$nine\r\n", 0.0, TierConfigError, "is no Redis"),
        (b"$99999999999999\r\n", 0.0, TierConfigError, "is no Redis"),
        (b"-LOADING it is loading\r\n", 0.0, TierUnavailableError, "LOADING"),
        (b"-MOVED 1 10.0.0.1:7000\r\n", 0.0, TierConfigError, "MOVED"),
    ],
    ids=["a trickle", "http", "no number", "too long", "loading", "a cluster"],
)
def test_what_no_sane_redis_answers(
    redis_place: RedisPlace, answer: bytes, pause_s: float, error: type[Exception], said: str
) -> None:
    """An error that says so, within the timeout, however slowly the answer comes."""
    impostor = Impostor(answer, pause_s)
    tier = redis_place.tier(
        url=f"redis://127.0.0.1:{impostor.port}", options={"password": "", **HASTY}
    )
    try:
        began = time.monotonic()
        with pytest.raises(error, match=re.escape(said)):
            list(tier.read([empty_like(make_chunk(6))]))
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    finally:
        tier.close()
        impostor.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``key.pem`` and the ``certificate.pem`` that it has signed for itself."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    (folder / "certificate.pem").write_bytes(made.public_bytes(pem))
    return folder


def test_tls(
    free_port: Callable[[], int], tmp_path: Path, certificate: Path, redis_place: RedisPlace
) -> None:
    """Chunks cross it whole; a certificate that nobody we know has signed is refused, and a server
    without TLS is an error too.
    """
    port, ca_file = free_port(), str(certificate / "certificate.pem")
    options = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no")
    files = ("--tls-key-file", str(certificate / "key.pem"), "--tls-cert-file", ca_file)
    server = redis_server(port, tmp_path, *options, *files, "--tls-ca-cert-file", ca_file)
    try:
        url = f"rediss://127.0.0.1:{port}"
        tier = redis_place.tier(url=url, options={"password": "", "ca_file": ca_file})
        tier.check()
        chunks = [make_chunk(seed) for seed in range(60, 64)]
        tier.write([chunk.buffers for chunk in chunks])
        buffers = [empty_like(chunk) for chunk in chunks]
        assert dict(tier.read(buffers)) == dict.fromkeys(range(4), ReadOutcome.HIT)
        assert [verify(b) for b in buffers] == [chunk.header for chunk in chunks]
        tier.close()
        stranger = redis_place.tier(url=url, options={"password": ""})
        with pytest.raises(TierConfigError, match=r"cannot be trusted.*ca_file"):
            stranger.check()
    finally:
        server.kill()
    plain = redis_place.tier(url=f"rediss://127.0.0.1:{redis_place.server.port}")
    with pytest.raises(TierUnavailableError, match="cannot be reached"):
        plain.check()


def test_a_wrong_bucket(s3_place: S3Place) -> None:
    """Start-up says that there is none of that name, whether it would write or read."""
    for admission in ("always", "never"):
        tier = s3_place.tier(url="s3://elsewhere/here", admission=admission)
        with pytest.raises(TierConfigError, match=r"s3://elsewhere/here.*no such bucket"):
            tier.check()
        tier.close()


def test_wrong_keys(s3_place: S3Place) -> None:
    """An error of the configuration, at start and later, that does not tell the secret."""
    tier = s3_place.tier(options={"secret_key": "hush-hush"})
    tier.check()
    s3_place.s3.refuse_credentials(True)
    try:
        for call in (tier.check, lambda: list(tier.read([empty_like(make_chunk(7))]))):
            with pytest.raises(TierConfigError, match="refuses the credentials") as caught:
                call()
            assert "hush-hush" not in str(caught.value)
            assert "\n" not in str(caught.value)
    finally:
        s3_place.s3.refuse_credentials(False)
        tier.close()


def test_no_keys_at_all(
    s3_place: S3Place, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    """None given, none in the environment, and nobody who tells the machine's role."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    tier = s3_place.tier(options={"access_key": "", "secret_key": ""})
    with pytest.raises(TierConfigError, match=r"no credentials.*access_key"):
        tier.check()
    tier.close()


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "splitserve.kv_transfer.cache.tiers.s3", raising=False)
    with pytest.raises(TierConfigError, match=re.escape("pip install 'splitserve[s3]'")):
        registry.create(TierSettings(type="s3", url="s3://bucket"))
