"""What an engine is refused for, in a sentence."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from splitserve.orchestrator.engines.vllm.support import (
    PLUGIN,
    PLUGINS_ENV,
    UnsupportedEngineError,
    refuse_missing_plugin,
)


def test_the_plugin_that_continues_answers_must_be_loaded() -> None:
    """vLLM loads all plugins unless it is given a list; a list must have ours in it."""
    assert PLUGIN in {point.name for point in entry_points(group="vllm.general_plugins")}
    refuse_missing_plugin({})
    refuse_missing_plugin({PLUGINS_ENV: f"other,{PLUGIN}"})
    for named in ("", "other", f"{PLUGIN}_2"):
        with pytest.raises(UnsupportedEngineError, match=f"leaves out {PLUGIN}"):
            refuse_missing_plugin({PLUGINS_ENV: named})
