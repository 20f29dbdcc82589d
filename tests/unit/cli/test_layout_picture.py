"""``heterotrain plot --layout``: the stages of a running job, from its plan and what its workers measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heterotrain_cli.cluster import api
from heterotrain_cli.cluster.layout_picture import layout_of
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.main import main
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Layout, LayoutKind, Plan
from support.api_stub import ApiStub
from support.cli_runner import CliRunner
from support.plans import plan_of
from support.unit_series import KIND, series, unit
from unit.cli.test_client import prometheus

JOB = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs/gpt"
PLAN = "/api/v1/namespaces/ml/configmaps/gpt-plan"
UNITS = 6


def the_plan(*layouts: Layout) -> Plan:
    plan = plan_of([8] * len(layouts), layouts=layouts)
    return replace(plan, members=tuple(replace(member, micro_batch_samples=2) for member in plan.members))


@pytest.fixture
def stub(stub: ApiStub) -> ApiStub:
    """A job with one member of two stages, units 0 to 3 and 4 to 5, and one that holds everything."""
    plan = the_plan(Layout(kind=LayoutKind.PIPELINE, cuts=(4,)), Layout())
    job = {
        "metadata": {"name": "gpt", "namespace": "ml", "uid": "j", "creationTimestamp": "2026-11-22T10:00:00Z"},
        "spec": {"parallelism": {"mode": "Pipeline", "linkMbitPerSecond": 8}}, "status": {"stepSeconds": 12.5},
    }  # fmt: skip
    stub.objects = {JOB: job, PLAN: {"data": {"plan.json": encode_plan(plan)}}}
    return stub


def answers(workers: tuple[str, ...] = ("w0", "w1", "w2")) -> Any:
    """Return what Prometheus answers: the profile of every worker."""
    rows = series([unit(index) for index in range(UNITS)])

    def answer(query: str) -> dict[str, Any]:
        name = "heterotrain_unit_seconds" if "heterotrain_unit_seconds" in query else "heterotrain_unit_bytes"
        found = [
            {"metric": {**labels, "worker": worker}, "value": [0, str(value)]}
            for worker in workers
            for labels, value in rows
            if labels["__name__"] == name
        ]
        return {"status": "success", "data": {"resultType": "vector", "result": found}}

    return answer


def test_stages_have_the_times_of_their_units_and_links(stub: ApiStub) -> None:
    with prometheus(answers()) as where:
        found = layout_of(api.Cluster(Target(namespace="ml")), where, "gpt")
    cut, whole = found.members
    units = [unit(index).seconds[KIND][1] for index in range(UNITS)]  # of two samples
    message_s = 2 * unit(3).boundary_bytes / 1e6
    forward_s, backward_s = cut.stages[0].passes
    assert forward_s == pytest.approx(sum(each.forward_s for each in units[:4]))
    assert backward_s == pytest.approx(sum(each.backward_s for each in units[:4]) + message_s)
    assert cut.stages[1].passes.forward_s == pytest.approx(sum(each.forward_s for each in units[4:]) + message_s)
    assert cut.stages[0].label == "w0 · pool\nunits 0-3 (before blocks to blocks.3)"
    assert (cut.micro_batches, whole.micro_batches, len(whole.stages)) == (4, 4, 1)
    assert whole.bubble_ratio(0) == pytest.approx(0)
    assert 0 < cut.bubble_ratio(0) < 1
    assert (found.predicted_s, found.measured_s) == (None, 12.5)


def test_pools_may_have_a_link_of_their_own(stub: ApiStub) -> None:
    stub.objects[JOB]["spec"]["parallelism"]["links"] = [{"between": ["pool", "pool"], "mbitPerSecond": 4}]
    with prometheus(answers()) as where:
        found = layout_of(api.Cluster(Target(namespace="ml")), where, "gpt")
    units = [unit(index).seconds[KIND][1] for index in range(UNITS)]
    expected = sum(each.forward_s for each in units[4:]) + 2 * unit(3).boundary_bytes / 0.5e6
    assert found.members[0].stages[1].passes.forward_s == pytest.approx(expected)


def test_the_picture_of_a_layout(stub: ApiStub, tmp_path: Path) -> None:
    picture = tmp_path / "stages.svg"
    with prometheus(answers()) as where:
        result = CliRunner().invoke(main, ["plot", "gpt", "-o", str(picture), "--layout", "--prometheus", where])
    assert (result.exit_code, result.stdout) == (0, f"{picture}: 2 members, 3 stages\n"), result.output
    assert picture.read_text().startswith("<?xml")


def test_what_cannot_be_drawn_is_told_in_a_sentence(stub: ApiStub, tmp_path: Path) -> None:
    def told(workers: tuple[str, ...], output: Path = tmp_path / "stages.png") -> str:
        with prometheus(answers(workers)) as where:
            result = CliRunner().invoke(main, ["plot", "gpt", "-o", str(output), "--layout", "--prometheus", where])
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "no profile of the model's units from worker w1" in told(("w0", "w2"))
    assert "cannot be written" in told(("w0", "w1", "w2"), tmp_path / "missing" / "stages.png")
    stub.objects[PLAN]["data"]["plan.json"] = encode_plan(the_plan(Layout()))
    assert "no member of job gpt has stages" in told(("w0",))
