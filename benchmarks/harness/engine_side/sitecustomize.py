"""Loaded by the engines of a benchmark that ask for it: changes a module right after its import.

``NIXL_PROGRESS_DELAY_US`` (peers): the Python class ``nixl_agent`` sets ``pthrDelay`` to 0, so the
progress thread polls without a pause and takes a whole core on an idle engine; no argument changes
it. With the variable the native agent is made with that delay. This is what makes vLLM's NIXL
connectors a fair peer on a host with few cores.

``PLANTED_FAULT_FILE`` (splitserve's P, equality only): transports are wrapped so that writes go
wrong on demand; see ``planted_faults``.

Without these variables nothing is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _BindingsWithDelay:
    """The native bindings, except that agents get a progress delay."""

    def __init__(self, bindings: ModuleType, delay_us: int) -> None:
        self._bindings = bindings
        self._delay_us = delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        """The binding's constructor, under the binding's name."""
        config.pthrDelay = self._delay_us
        print(f"nixl agent {name}: progress delay {self._delay_us} us", file=sys.stderr)
        return self._bindings.nixlAgent(name, config)


def _delay_progress(module: ModuleType) -> None:
    delay_us = int(os.environ["NIXL_PROGRESS_DELAY_US"])
    module.nixlBind = _BindingsWithDelay(module.nixlBind, delay_us)  # type: ignore[attr-defined]


def _plant_faults(module: ModuleType) -> None:
    from planted_faults import wrap_create

    module.create = wrap_create(module.create)  # type: ignore[attr-defined]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a change when the named module has been executed, before its importer sees it."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with the change added to its execution."""
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if "NIXL_PROGRESS_DELAY_US" in os.environ:
    for _name in ("nixl_cu12._api", "nixl_cu13._api"):
        sys.meta_path.insert(0, _AfterImport(_name, _delay_progress))
if "PLANTED_FAULT_FILE" in os.environ:
    _registry = "splitserve.kv_transfer.transports.registry"
    sys.meta_path.insert(0, _AfterImport(_registry, _plant_faults))
