"""The alerts, the scrape configuration and the dashboard that come with splitserve."""

from __future__ import annotations

import copy
import json
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families
from router_stubs.cache_server import cache_server_stub
from router_stubs.cluster import stub_cluster
from support.promtool import OBSERVABILITY, metrics_in, promtool, samples_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RULE_TESTS = Path(__file__).parents[2] / "observability" / "alerts_test.yaml"
VARIABLES = {"$__rate_interval": "5m", "$router": ".*"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """The dashboard's JSON."""
    found: dict[str, Any] = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())
    return found


def panels_of(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that shows something."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions_of(dashboard: dict[str, Any]) -> list[str]:
    """What panels ask Prometheus, with Grafana's variables filled in."""
    found = [target["expr"] for panel in panels_of(dashboard) for target in panel["targets"]]
    for variable, value in VARIABLES.items():
        found = [expression.replace(variable, value) for expression in found]
    return found


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    (group,) = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_prometheus_takes_rules_and_configuration() -> None:
    """`promtool check` finds no fault."""
    promtool("check", "rules", OBSERVABILITY / "alerts.yaml")
    promtool("check", "config", OBSERVABILITY / "prometheus.yaml")


def test_rules_fire_when_they_should() -> None:
    """`promtool test rules`: each fires for its trouble, none for a cluster that is well; a rule
    without such a test is refused here.
    """
    promtool("test", "rules", RULE_TESTS)
    tested = RULE_TESTS.read_text()
    for rule in rules():
        assert f"""'{{alertname="{rule["alert"]}"}}'""" in tested
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_expression_of_the_dashboard_parses(
    dashboard: dict[str, Any], tmp_path: Path
) -> None:
    """As rules they pass `promtool check rules`, and nothing of Grafana's is left in them."""
    expressions = expressions_of(dashboard)
    assert len(expressions) > 60
    assert not [expression for expression in expressions if "$" in expression]
    file = tmp_path / "dashboard.yaml"
    recorded = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(expressions)
    ]
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"{len(expressions)} rules found" in promtool("check", "rules", file)


async def test_rules_and_panels_name_metrics_that_exist(
    dashboard: dict[str, Any], tmp_path: Path
) -> None:
    """A router with everything on has each of them; engines' own are compared with real ones in
    the end-to-end tests.
    """
    exposed: set[str] = set()
    with cache_server_stub(tmp_path / "cache.sock") as stub:
        tracing = {"otlp_endpoint": "http://127.0.0.1:1"}
        async with stub_cluster("p0", "d0", cache=stub.section, tracing=tracing) as cluster:
            text = await (await cluster.session.get(cluster.url + "/metrics")).text()
    for family in text_string_to_metric_families(text):
        exposed |= samples_of(family.name, family.type)
    asked = expressions_of(dashboard) + [rule["expr"] for rule in rules()]
    named = set().union(*map(metrics_in, asked))
    assert len(named) > 50
    assert {name for name in named - exposed if not name.startswith("vllm:")} == set()


def lost(given: object, kept: object, path: str = "") -> Iterator[str]:
    """Where ``kept`` has not what ``given`` has."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{number}]")
    elif given != kept:
        yield path


def through_schema(dashboard: dict[str, Any]) -> Any:
    """What Grafana's own classes, which are generated from its schema, keep of it."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(dashboard))))


def test_grafana_knows_every_key_of_the_dashboard(dashboard: dict[str, Any]) -> None:
    """Its schema's classes lose nothing of it, and would lose a key that they do not know."""
    assert list(lost(dashboard, through_schema(dashboard))) == []
    for places in (("panels", 1), ("panels", 10, "options", "legend"), ("templating", "list", 1)):
        odd = copy.deepcopy(dashboard)
        place: Any = odd
        for key in places:
            place = place[key]
        place["nonsense"] = 1
        assert [path.endswith(".nonsense") for path in lost(odd, through_schema(odd))] == [True]


def test_panels_are_whole(dashboard: dict[str, Any]) -> None:
    """Ids are unique; panels fill no place twice and stay on the grid; each says what it shows, in
    which unit, of the data source that the reader has chosen.
    """
    panels = list(panels_of(dashboard))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for place in places:
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
