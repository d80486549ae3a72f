"""What operators and clients can see of requests: metrics, log lines, timelines, status."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_stubs.cluster import SECRET, StubCluster, completion, stub_cluster

from splitserve.orchestrator.agent.auth import agent_token
from splitserve.orchestrator.core.effects import Timeline
from splitserve.orchestrator.router.request_log import Entry, RequestLog
from splitserve.orchestrator.router.token_counts import Tally

OPERATOR = {"Authorization": f"Bearer {agent_token(SECRET)}"}


async def samples(cluster: StubCluster) -> dict[str, float]:
    """The metrics by name and labels."""
    response = await cluster.session.get(cluster.url + "/metrics")
    families = text_string_to_metric_families(await response.text())
    return {
        "".join([s.name, *(f" {v}" for v in s.labels.values())]): s.value
        for family in families
        for s in family.samples
    }


async def test_requests_are_counted_and_timed() -> None:
    """By endpoint, outcome and status; decisions by type; durations in seconds; gauges back at
    zero.
    """
    async with stub_cluster("p0", "d0") as cluster:
        for body in (completion(), completion(n=2), completion(stream=False)):
            await (await cluster.post(json=body)).read()
        await cluster.post(data=b"{", headers={"Content-Type": "application/json"})
        await cluster.idle()
        seen = await samples(cluster)
        assert seen["splitserve_requests_total completions ok 200"] == 3
        assert seen["splitserve_disaggregation_decisions_total split"] == 2
        assert seen["splitserve_disaggregation_decisions_total alone_not_splittable"] == 1
        assert seen["splitserve_requests_refused_at_the_door_total 400"] == 1
        assert seen["splitserve_time_to_first_token_seconds_count"] == 2
        assert seen["splitserve_request_duration_seconds_count"] == 3
        assert seen["splitserve_prefill_leg_seconds_count"] == 2
        assert seen["splitserve_requests_running"] == seen["splitserve_requests_waiting"] == 0
        assert seen["splitserve_node_free_blocks d0 decode"] == 10_000
        assert 0 < seen["splitserve_request_duration_seconds_sum"] < 10


async def test_labels_are_bounded() -> None:
    """What clients send never becomes a label."""
    async with stub_cluster("p0", "d0") as cluster:
        for number in range(20):
            body = completion(model=f"model-{number}")
            await cluster.post(json=body, headers={"X-Request-Id": f"id-{number}"})
            await cluster.session.get(f"{cluster.url}/path-{number}")
        text = await (await cluster.session.get(cluster.url + "/metrics")).text()
        assert "-7" not in text


@pytest.mark.parametrize(
    ("threshold", "split"), [(None, 3), (0, 3), (1, 3), (65, 2), (1_000_000, 0)]
)
async def test_the_metrics_tell_what_a_threshold_does(threshold: int | None, split: int) -> None:
    """Without one, and with 0, every prompt is split that can be; prompts of 64, 65 and 500 tokens
    otherwise as they are long enough.
    """
    policy = {} if threshold is None else {"conditional": {"min_uncached_tokens": threshold}}
    async with stub_cluster("p0", "d0", policy=policy) as cluster:
        for length in (64, 65, 500):
            await (await cluster.post(json=completion(prompt=[7] * length))).read()
            await cluster.idle()
        text = await (await cluster.session.get(cluster.url + "/metrics")).text()
        name = "splitserve_disaggregation_decisions_total"
        counts = {
            kind: float(value)
            for kind, value in re.findall(rf'{name}{{decision_type="(\w+)"}} (\S+)', text)
        }
        assert counts.get("split", 0) == split
        assert counts.get("alone_short_prompt", 0) == 3 - split
        assert len(cluster.engines["p0"].asked) == split


async def test_each_request_is_one_log_line() -> None:
    """With its times in order, its nodes and its outcome; no prompt, no key."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "acme"}) as cluster:
        headers = {"Authorization": "Bearer sk-1", "X-Request-Id": "mine"}
        await (await cluster.post(json=completion(prompt="private"), headers=headers)).read()
        await cluster.idle()
        cluster.router.log.flush()
        text = cluster.log.getvalue().decode()
        (line,) = text.splitlines()
        record = json.loads(line)
        assert (record["request_id"], record["tenant"], record["outcome"]) == ("mine", "acme", "ok")
        assert (record["prefill_node"], record["decode_node"]) == ("p0", "d0")
        assert 0 <= record["dispatched_ms"] <= record["first_data_ms"] <= record["last_data_ms"]
        assert record["prefill_status"] == 200
        assert "private" not in text
        assert "sk-1" not in text


async def test_a_timeline_is_for_its_tenant_and_for_operators() -> None:
    """By the X-Request-Id; other tenants see nothing."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a", "sk-2": "b"}) as cluster:
        one, two = ({"Authorization": f"Bearer sk-{n}"} for n in (1, 2))
        await (await cluster.post(headers=one | {"X-Request-Id": "mine"})).read()
        await cluster.idle()
        url = f"{cluster.url}/internal/timeline/mine"
        for headers, status in ((one, 200), (OPERATOR, 200), (two, 404), ({}, 401)):
            assert (await cluster.session.get(url, headers=headers)).status == status


async def test_two_tenants_choose_the_same_request_id() -> None:
    """Each sees its own request; operators the latest."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a", "sk-2": "b"}) as cluster:
        one, two = ({"Authorization": f"Bearer sk-{n}"} for n in (1, 2))
        for headers in (one, two):
            await (await cluster.post(headers=headers | {"X-Request-Id": "same"})).read()
        await cluster.idle()
        url = f"{cluster.url}/internal/timeline/same"
        for headers, tenant in ((one, "a"), (two, "b"), (OPERATOR, "b")):
            response = await cluster.session.get(url, headers=headers)
            assert (await response.json())["tenant"] == tenant


async def test_with_keys_the_status_is_for_operators() -> None:
    """Others get 401; engines' keys are never shown."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as cluster:
        url = f"{cluster.url}/internal/status"
        assert (await cluster.session.get(url)).status == 401
        response = await cluster.session.get(url, headers=OPERATOR)
        assert response.status == 200
        assert "key-p0" not in await response.text()


def test_a_request_log_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    """Lost lines are counted and said once each way; nobody else is disturbed."""
    timeline = Timeline(
        request_id="r",
        endpoint="completions",
        tenant="",
        streaming=True,
        prompt_tokens=1,
        received=0.0,
    )
    with Path("/dev/full").open("wb", buffering=0) as full:
        log = RequestLog(full, 10)  # type: ignore[arg-type]
        for _ in range(3):
            log._unwritten.append(Entry(timeline, Tally("x")))
            log.flush()
        assert caplog.text.count("the request log cannot be written") == 1
    kept = io.BytesIO()
    assert log._lines is not None
    log._lines.stream = kept
    log._unwritten.append(Entry(timeline, Tally("x")))
    log.flush()
    assert "3 lines of the request log were lost" in caplog.text
    assert kept.getvalue().count(b"\n") == 1
