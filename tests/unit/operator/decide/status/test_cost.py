"""What a job has cost: the time in which workers had nodes, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Rates, Telemetry
from support.fake_cluster import FakeCluster, pool


def priced(price: str = "3.60", **spec: object) -> FakeCluster:
    pools = [pool("a", pricePerHour=price), pool("b", pricePerHour="1.80"), pool("c")]
    return FakeCluster(*pools, spec=dict(spec)).with_nodes("a", "b", "c").start()


def test_the_cost_grows_with_the_workers_that_have_nodes() -> None:
    cluster = priced()
    assert cluster.status["pricePerHour"] == "5.40"
    assert float(cluster.status["cost"]) == 0
    cluster.pass_time(3600).settle()
    assert float(cluster.status["cost"]) == pytest.approx(5.4)
    cluster.vanish("job-w0").settle()  # its successor has no node yet
    cluster.pass_time(1800).settle()
    assert float(cluster.status["cost"]) == pytest.approx(5.4 + 0.9)


def test_the_cost_of_an_ended_or_suspended_job_stays() -> None:
    cluster = priced()
    cluster.pass_time(90)
    cluster.edit(lambda spec: spec.update(suspend=True)).settle()
    for name in list(cluster.pods):
        cluster.vanish(name)
    cluster.settle()
    known = cluster.status["cost"]
    assert float(known) == pytest.approx(5.4 * 90 / 3600, abs=1e-4)
    cluster.pass_time(1e6).settle()
    assert cluster.status["cost"] == known


def test_the_cost_alone_rewrites_the_status_once_a_minute() -> None:
    cluster = priced()
    written = []
    for _ in range(180):
        cluster.pass_time(1).settle()
        written.append(cluster.status["cost"])
    assert len(set(written)) in (3, 4)


def test_a_new_operator_counts_the_time_without_one_once() -> None:
    """The amount is in the status, so nothing else has to survive."""
    cluster = priced()
    cluster.pass_time(600).settle()
    cluster.pass_time(600).settle()
    cluster.settle()
    assert float(cluster.status["cost"]) == pytest.approx(5.4 * 1200 / 3600)


def test_a_clock_that_goes_back_costs_nothing() -> None:
    cluster = priced()
    cluster.pass_time(3600).settle()
    cluster.pass_time(-1800).settle()
    assert float(cluster.status["cost"]) == pytest.approx(5.4)


def test_a_step_has_a_price_once_its_time_is_known() -> None:
    cluster = priced()
    assert "costPerStep" not in cluster.status
    gauges = {MemberId(view.uid, 0): MemberGauges(worker=view.name, step=1) for view in cluster.pod_views}
    cluster.telemetry = replace(Telemetry(), gauges=gauges, rates=Rates(step_s=0.5), newest_sample_s=cluster.now_s)
    cluster.settle()
    assert float(cluster.status["costPerStep"]) == pytest.approx(5.4 / 7200)


@pytest.mark.parametrize("price", ["1" + "0" * 20, "0.000000001"])
def test_odd_prices_fit_the_status(price: str) -> None:
    cluster = priced(price)
    cluster.pass_time(3600).settle()
    assert float(cluster.status["cost"]) == pytest.approx(float(price) + 1.8, rel=1e-3)


def test_a_job_without_prices_has_no_cost() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c").start()
    cluster.pass_time(3600).settle()
    assert "cost" not in cluster.status


def limited(most: str, price: str = "3.60") -> FakeCluster:
    pools = [pool("a", pricePerHour=price), pool("b", pricePerHour="1.80")]
    checkpoint = {"uri": "file:///models/job"}
    return FakeCluster(*pools, spec={"maxCost": most, "checkpoint": checkpoint}).with_nodes("a", "b").start()


def test_a_job_that_has_cost_its_limit_fails_in_time_and_says_how_to_go_on() -> None:
    cluster = limited("5.40")
    assert cluster.pass_time(3599).settle() is not None
    assert cluster.condition("Failed")[0] == "False"
    assert cluster.step().again_s == pytest.approx(1.0), "nothing but time ends it"
    cluster.pass_time(1).settle()
    assert cluster.condition("Failed") == ("True", "MaxCostReached")
    told = cluster.message("Failed")
    assert "cost all of maxCost (5.40): raise maxCost; `heterotrain retry job`" in told
    assert float(cluster.status["cost"]) == pytest.approx(5.4)


def test_a_limit_counts_what_was_paid_and_not_time() -> None:
    cluster = limited("5.40")
    cluster.pass_time(1800).settle()
    cluster.edit(lambda spec: spec.update(suspend=True)).settle()
    for name in list(cluster.pods):
        cluster.vanish(name)
    cluster.settle()
    cluster.pass_time(1e6).settle()
    assert cluster.condition("Failed")[0] == "False", "a suspended job costs nothing"
    cluster.edit(lambda spec: spec.update(suspend=False)).settle()
    cluster.schedule().run().settle()
    cluster.pass_time(1700).settle()
    assert cluster.condition("Failed")[0] == "False"
    cluster.pass_time(200).settle()
    assert cluster.condition("Failed") == ("True", "MaxCostReached")


def test_a_raised_limit_and_another_try_go_on() -> None:
    cluster = limited("5.40")
    cluster.pass_time(3601).settle()
    assert cluster.condition("Failed")[0] == "True"
    cluster.edit(lambda spec: spec.update(maxCost="10"))
    cluster.job["metadata"].setdefault("annotations", {})[keys.ANNOTATION_RETRY] = "now"
    for name in list(cluster.pods):
        cluster.vanish(name)
    cluster.settle()
    cluster.schedule().run().settle()
    assert cluster.condition("Failed")[0] == "False"
    assert len(cluster.pods) == 2
