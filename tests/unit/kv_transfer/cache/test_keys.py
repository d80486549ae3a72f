"""Names of chunks, and what they depend on."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from splitserve.kv_transfer.cache import keys as keys_module
from splitserve.kv_transfer.cache.keys import (
    KEY_BYTES,
    NO_TENANT,
    JoinedKeys,
    KeyChain,
    Media,
    chunk_keys,
    compile_keys,
    model_digest,
    root_key,
    split_keys,
    tenant_of,
)

FINGERPRINT = {"weights": "w", "dtype": "bfloat16", "block_size": "32", "tokenizer": "t"}
TOKENS = list(range(100, 132))
TENANT = b"tenant-1"


def keys(
    tokens: list[int] = TOKENS,
    *,
    fingerprint: dict[str, str] = FINGERPRINT,
    salt: str = "",
    adapter: str = "",
    tenant: bytes = NO_TENANT,
    media: tuple[Media, ...] = (),
) -> list[bytes]:
    root = root_key(model_digest(fingerprint, 8), tenant, salt, adapter)
    return KeyChain(root, 8, media).extend(tokens)


def test_keys_are_those_that_are_stored() -> None:
    """They are written down here: other ones would find nothing of what stores hold."""
    assert keys()[-1].hex() == "0000000000000000d6e2261aef3d005bb3087fca313c9a5add09e4dfc5836916"
    assert [len(key) for key in keys()] == [KEY_BYTES] * 4


def test_every_process_computes_the_same_keys() -> None:
    """Whatever its hash seed."""
    program = (
        "from splitserve.kv_transfer.cache.keys import *;"
        f"root = root_key(model_digest({FINGERPRINT!r}, 8), NO_TENANT, '', '');"
        f"print(chunk_keys(root, {TOKENS!r}, 8)[-1].hex())"
    )
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.strip() == keys()[-1].hex()


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": {**FINGERPRINT, "weights": "v"}},
        {"fingerprint": {**FINGERPRINT, "dtype": "float16"}},
        {"fingerprint": {**FINGERPRINT, "positions": "new"}},
        {"salt": "s"},
        {"adapter": "a"},
        {"salt": "ab", "adapter": ""},
        {"tenant": TENANT},
        {"tokens": [1, *TOKENS[1:]]},
        {"media": (Media("cat", 2, 3),)},
    ],
    ids=str,
)
def test_keys_depend_on(other: dict[str, object]) -> None:
    """Everything that the KV depends on: no chunk has the same name."""
    assert not set(keys()) & set(keys(**other))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["block_size", "kv_layout", "attention_isa", "device", "tokenizer"]
)
def test_keys_do_not_depend_on(name: str) -> None:
    """How KV lies in memory, and how text became tokens."""
    assert keys(fingerprint={**FINGERPRINT, name: "other"}) == keys()


def test_salt_and_adapter_do_not_run_into_each_other() -> None:
    """(ab, c) is not (a, bc)."""
    assert keys(salt="ab", adapter="c") != keys(salt="a", adapter="bc")


def test_a_change_shows_from_its_chunk_on() -> None:
    """Chunks before a changed token, or before a picture, keep their names."""
    changed = keys([*TOKENS[:17], 5, *TOKENS[18:]])
    assert [a == b for a, b in zip(keys(), changed, strict=True)] == [True, True, False, False]
    pictured = keys(media=(Media("cat", 14, 6),))
    assert [a == b for a, b in zip(keys(), pictured, strict=True)] == [True, False, False, False]
    assert keys(media=(Media("cat", 14, 6),)) != keys(media=(Media("dog", 14, 6),))
    assert keys(media=(Media("cat", 14, 6),)) != keys(media=(Media("cat", 13, 7),))


def test_known_keys_are_continued() -> None:
    """The answer's chunks get the keys that the whole text would give them."""
    root = root_key(model_digest(FINGERPRINT, 8), TENANT, "", "")
    whole = chunk_keys(root, TOKENS, 8)
    chain = KeyChain(root, 8)
    assert chain.extend(TOKENS[:20]) == whole[:2]
    assert chain.extend(TOKENS) == whole
    assert chunk_keys(root, TOKENS[:23], 8) == whole[:2]
    assert chunk_keys(root, TOKENS[:7], 8) == []
    assert chunk_keys(root, tuple(TOKENS), 8) == whole


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of later tests are made by the library again."""
    monkeypatch.setattr(keys_module, "_compiled", None)


ODD_TOKENS = (0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1)
"""Where the size of a number's encoding changes."""


@pytest.mark.usefixtures("restored")
def test_compiled_keys_are_the_same_keys() -> None:
    """For chunks of all sizes, continued, of a tuple, beside pictures, and at once."""
    rng = random.Random(5)
    tokens = [rng.choice([*ODD_TOKENS, rng.randrange(50_000)]) for _ in range(20_000)]
    root = root_key(model_digest(FINGERPRINT, 8), TENANT, "", "")
    sizes = (1, 7, 16, 255, 256, 257, 512, 1_000, 8_192, 8_193)
    expected = {size: chunk_keys(root, tokens, size) for size in sizes}
    media = (Media("cat", 300, 500),)
    pictured = KeyChain(root, 256, media).extend(tokens)
    compile_keys()
    assert keys_module._compiled is not None
    for size in sizes:
        assert chunk_keys(root, tokens, size) == expected[size], size
    chain = KeyChain(root, 16)
    chain.extend(tokens[:1_000])
    chain.extend(tuple(tokens[:1_009]))
    assert chain.extend(tokens) == expected[16]
    assert KeyChain(root, 256, media).extend(tokens) == pictured != expected[256]
    assert chunk_keys(root, tokens[:15], 16) == []
    assert chunk_keys(root, range(100, 132), 8) == keys(tenant=TENANT)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("token", [-1, 2**32, 2**63])
def test_what_is_no_token_is_refused(token: int, is_compiled: bool) -> None:
    """No key stands for a number that was cut off."""
    if is_compiled:
        compile_keys()
    with pytest.raises(ValueError, match="no number from 0 to 4294967295"):
        keys([*TOKENS[:3], token, *TOKENS[4:]])


def test_keys_begin_with_their_tenant() -> None:
    """So that a store can count them."""
    assert {tenant_of(key) for key in keys(tenant=TENANT)} == {TENANT}


def test_joined_keys() -> None:
    """They come apart again, whole keys only."""
    assert split_keys(b"".join(keys())) == keys()
    with pytest.raises(ValueError, match="no whole number"):
        split_keys(b"".join(keys())[:-1])


def test_joined_keys_are_cut_out_one_by_one() -> None:
    """As a list of them would be; what is no whole number of keys is refused."""
    found = keys(tenant=TENANT)
    joined = JoinedKeys(b"".join(found))
    assert list(joined) == found
    assert list(joined[1:]) == found[1:]
    assert list(joined[1:][2:]) == found[3:]
    assert joined[1:][0] == found[1]
    assert len(joined[9:]) == 0
    assert joined[1:3] == found[1:3]
    with pytest.raises(IndexError):
        joined[4]
    with pytest.raises(ValueError, match="no whole number"):
        JoinedKeys(b"".join(found)[:-1])
