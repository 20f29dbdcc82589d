"""Speeds of earlier jobs: only of the same program on the same pool, whatever the ConfigMap holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_operator.api.kept_speed import KeptEntry
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.kept_speeds import (
    MOST_ENTRIES,
    NAME,
    config_map,
    entry_of,
    keeps_speeds,
    keys_by_pool,
    read_entries,
    usable_speeds,
)
from heterotrain_planner.planning.kept_speed import KeptSpeed, SharesSeen, as_model
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import Body, FakeCluster, pool
from support.repeat import times

SPEED = KeptSpeed(
    compute=ComputeTime(
        per_sample_s=0.001, fixed_s=0.02, backward_per_sample_s=0.002, backward_fixed_s=0.01, update_s=0.01
    ),
    variation=0.05,
    seen=(SharesSeen(20, 1, 40), SharesSeen(60, 2, 200)),
)
OURS = {keys.LABEL_MANAGED_BY: keys.MANAGED_BY}
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "image", "command": ["train"], "args": ["--big"]}]}}


def started(
    *pools: Body, spec: Body | None = None, template: Body | None = None, tags: dict[str, str] | None = None
) -> FakeCluster:
    cluster = FakeCluster(*(pools or (pool("a"), pool("b"))), spec=spec, template=template or TEMPLATE)
    cluster.moved_tags = tags or {}
    return cluster.with_nodes("a", "b", "c").start()


def keys_of(cluster: FakeCluster) -> dict[str, str]:
    job = cluster.job_view
    assert isinstance(job, ValidJob)
    return keys_by_pool(job, cluster.pod_views)


def with_main(**fields: Any) -> Body:
    return {"spec": {"containers": [{**TEMPLATE["spec"]["containers"][0], **fields}]}}


def with_volume(**source: Any) -> Body:
    """Return a template with a volume of this source."""
    return {"spec": {**TEMPLATE["spec"], "volumes": [{"name": "volume", **source}]}}


def test_scripts_in_config_maps_are_programs() -> None:
    scripts = [keys_of(started(template=with_volume(configMap={"name": name}))) for name in "xy"]
    assert not set(scripts[0].values()) & set(scripts[1].values())


def test_the_same_program_has_the_same_keys_whatever_its_batch_length_and_seed() -> None:
    keys = keys_of(started())
    assert set(keys) == {"a", "b"}
    assert keys == keys_of(started(spec={"training": {"globalBatchSize": 120, "seed": 3, "epochs": 7}}))
    assert keys == keys_of(started(template=with_main(image="image:latest"), tags={"image:latest": "image"}))
    folders = [keys_of(started(template=with_volume(hostPath={"path": f"/data/{name}"}))) for name in "xy"]
    assert folders[0] == folders[1]
    assert keys_of(started(pool("a")))["a"] == keys["a"], "other pools do not change a pool's speed"
    assert len(set(keys.values())) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: started(tags={"image": "the tag was moved"}),
        lambda: started(template=with_main(image="other")),
        lambda: started(template=with_main(command=["train", "other"])),
        lambda: started(template=with_main(args=["--small"])),
        lambda: started(template=with_main(env=[{"name": "MODEL", "value": "large"}])),
        lambda: started(template={"spec": {**TEMPLATE["spec"], "priorityClassName": "other"}}),
        lambda: started(pool("a", resources={"limits": {"cpu": "2"}}), pool("b", resources={"limits": {"cpu": "2"}})),
        lambda: started(pool("a", microBatchSize=8), pool("b", microBatchSize=8)),
        lambda: started(spec={"training": {"precision": "BF16"}}),
        lambda: started(spec={"training": {"communication": {"compression": "FP16"}}}),
    ],
)
def test_another_program_has_other_keys(other: Callable[[], FakeCluster]) -> None:
    found = keys_of(other())
    assert len(found) == 2
    assert not set(found.values()) & set(keys_of(started()).values())


def test_pods_of_several_programs_have_no_key() -> None:
    """A tag that was moved between two pods, and a template that was edited after the pods were made."""
    cluster = started(pool("a", maxReplicas=2), pool("b"))
    name = next(name for name, body in cluster.pods.items() if body["spec"]["nodeSelector"] == {"pool": "a"})
    cluster.moved_tags = {"image": "newer"}
    cluster.set_ready(name)
    assert set(keys_of(cluster)) == {"b"}
    edited = started()
    edited.edit(lambda spec: spec.update(template=with_main(args=["--small"])))
    assert keys_of(edited) == {}


def test_jobs_whose_members_are_not_single_ranks_keep_nothing() -> None:
    jobs = [
        started().job_view,
        started(spec={"runtime": "Torchrun"}).job_view,
        started(spec={"parallelism": {"mode": "Sharded"}}).job_view,
        started(spec={"training": {"rebalance": {"boundary": "Never"}}}).job_view,
    ]
    assert [keeps_speeds(job) for job in jobs] == [True, False, False, False]


def entry(written_s: float = 1.0) -> KeptEntry:
    return entry_of(SPEED, pool="a", job="job", now_s=written_s)


def test_a_speed_comes_back_as_it_was_written() -> None:
    body = config_map("ns", {}, {"a.1": entry()})
    assert body is not None
    assert (body["metadata"]["name"], body["metadata"]["namespace"]) == (NAME, "ns")
    found, problem = read_entries(json.loads(json.dumps(body))["data"])
    assert problem == ""
    assert found["a.1"].speed == SPEED
    assert json.loads(body["data"]["a.1"])["shares"][1] == {"samples": 60, "microBatches": 2, "steps": 200}


def test_the_oldest_entries_go_first_and_broken_ones_at_once() -> None:
    known: Body = {"metadata": {"resourceVersion": "1", "labels": OURS}, "data": {"broken": "{"}}
    for number in range(MOST_ENTRIES + 5):
        known = after(known, {f"a.{number:02}": entry(float(number))})
    assert sorted(known["data"]) == [f"a.{number:02}" for number in range(5, MOST_ENTRIES + 5)]
    again = after(known, {"a.05": entry(1000.0), "a.99": entry(1001.0)})["data"]
    assert "a.05" in again
    assert "a.06" not in again
    assert sum(map(len, again.values())) < 100_000, "a ConfigMap holds a million"


def test_entries_of_the_future_keep_no_others_out() -> None:
    """A user writes them, or an operator whose clock was wrong; they would otherwise be the newest for ever."""
    known: Body = {"metadata": {"resourceVersion": "1", "labels": OURS}, "data": {}}
    known = after(known, {f"f.{number:02}": entry(1e12 - number) for number in range(MOST_ENTRIES)})
    for number in range(MOST_ENTRIES):
        known = after(known, {f"a.{number:02}": entry(float(number))})
    assert sorted(known["data"]) == [f"a.{number:02}" for number in range(MOST_ENTRIES)]


def after(known: Body, new: dict[str, KeptEntry]) -> Body:
    body = config_map("ns", known, new)
    assert body is not None
    body["metadata"]["resourceVersion"] = "2"
    return body


def test_a_config_map_of_others_is_left_alone() -> None:
    assert config_map("ns", {"metadata": {"resourceVersion": "1"}, "data": {}}, {"a.1": entry()}) is None
    assert config_map("ns", {"metadata": {"resourceVersion": "1", "labels": OURS}}, {"a.1": entry()}) is not None


numbers = st.one_of(
    st.floats(), st.integers(), st.sampled_from([0, -1, 1e-300, 1e300, math.inf, math.nan, 2**70]), st.text(max_size=3)
)


@settings(max_examples=times(gate=60, every=3000))
@given(
    st.dictionaries(
        st.sampled_from([*KeptEntry.model_validate_json(entry().model_dump_json()).model_dump(by_alias=True), "x"]),
        numbers,
        max_size=4,
    ),
    st.one_of(
        st.none(),
        st.lists(st.dictionaries(st.sampled_from(["samples", "microBatches", "steps"]), numbers), max_size=12),
    ),
)
def test_whatever_a_user_writes_is_read_as_a_usable_speed_or_ignored_with_a_sentence(
    changed: dict[str, Any], shares: list[Any] | None
) -> None:
    raw = {**json.loads(entry().model_dump_json(by_alias=True)), **changed}
    text = json.dumps(raw if shares is None else {**raw, "shares": shares})
    found, problem = read_entries({"good": entry().model_dump_json(by_alias=True), "edited": text})
    assert "good" in found
    assert ("edited" in found) == (problem == "")
    for each in found.values():
        model = as_model(each.speed, "w")
        assert model.compute is None or all(
            math.isfinite(value) and value >= 0
            for value in (model.compute.per_sample_s, model.compute.fixed_s, model.compute.update_s)
        )


A_LINE = entry().model_dump_json(by_alias=True).replace('"job":"job"', '"job":"a\\nline"')


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "9" * 5000, '{"version": 2}', "\ud800", A_LINE])
def test_what_is_no_entry_is_named(text: str) -> None:
    found, problem = read_entries({"a.1": text})
    assert found == {}
    assert problem.startswith("entries without sense are ignored, such as a.1 (")
    assert len(problem) < 200


def test_a_job_starts_with_all_speeds_or_with_none() -> None:
    cluster = started()
    job, pods = cluster.job_view, cluster.pod_views
    assert isinstance(job, ValidJob)
    both = {"a": SPEED, "b": SPEED}
    assert usable_speeds(job, pods, both) == both
    assert usable_speeds(job, pods, {"a": SPEED}) == {}
    assert usable_speeds(job, pods, {}) == {}
    far = {name: replace(SPEED, seen=(SharesSeen(500, 1, 100),)) for name in both}
    assert usable_speeds(job, pods, far) == {}, "the batch of 100 is far from these shares"
