"""Planned parts of a model that did not fit into memory: the next plan cuts otherwise, a bounded number of times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract.outcome import Cause, Ending
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.allocation.layout_values import _problem
from heterotrain_operator.decide.plan.memory_limits import MOST_TRIES, SHRINK
from support.fake_cluster import FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster
from unit.operator.decide.plan.test_pipelines import STATE, UNITS, a_cluster, plan_of, profile

TWO_OF_A = (pool("a", maxReplicas=2),)


def units_of(cluster: FakeCluster) -> dict[str, int]:
    """Return the number of units that each worker holds by the newest plan."""
    plan = plan_of(cluster)
    found = {}
    for rank in plan.ranks:
        edges = (0, *plan.members[rank.member].layout.cuts, UNITS)
        found[rank.worker] = edges[rank.stage + 1] - edges[rank.stage]
    return found


def ran_out(cluster: FakeCluster, name: str, *, how: str = "device") -> None:
    """End a worker because memory ran out; another one takes its place and is ready."""
    if how == "device":
        cause = Cause.OUT_OF_DEVICE_MEMORY
        cluster.end(name, Ending.FAILED, exit_code=1, reason="a single sample does not fit", cause=cause)
    else:
        cluster.end(name, exit_code=137, reason="OOMKilled")
    cluster.settle()
    cluster.pass_time(60).settle()
    cluster.schedule().run()
    cluster.settle()


@pytest.mark.parametrize("how", ["device", "kernel"])
def test_a_stage_that_ran_out_of_memory_is_planned_smaller_and_is_no_failure(how: str) -> None:
    """Worker a holds four of six units and b two. After a's end, a holds three, although its workers report more."""
    profiles = {"a": profile("a", units_that_fit=5), "b": profile("b", units_that_fit=3.5, slowness=2)}
    cluster = a_cluster(profiles=profiles, backoffLimit=0).start()
    assert units_of(cluster) == {"job-w0": 4, "job-w1": 2}
    ran_out(cluster, "job-w0", how=how)
    assert units_of(cluster) == {"job-w1": 3, "job-w2": 3}
    assert (cluster.status["restarts"], cluster.condition("Failed")[0]) == (0, "False")
    assert cluster.events.count("ModelCutSmaller") == 1
    assert "WorkerFailed" not in cluster.events
    assert "job-w0 ran out of memory with 4.0" in cluster.status["lastFailure"]
    assert "pool a is planned with at most 3.41 GiB a device" in cluster.status["lastFailure"]
    kept = next(each for each in cluster.status["internal"]["pools"] if each["name"] == "a")
    assert kept["memory"]["limitBytes"] == pytest.approx(SHRINK * 4 * STATE, rel=0.01)
    assert "nodesWithFailures" not in cluster.status or not cluster.status["nodesWithFailures"]


def test_ends_that_repeat_come_to_an_end_with_a_sentence_and_never_in_the_same_cut() -> None:
    """Whatever the worker with most units is given does not fit. No restart counts, and it ends."""
    fast, slow = profile("a", units_that_fit=9), profile("b", units_that_fit=3.5, slowness=8)
    pools = (pool("a", maxReplicas=1), pool("b", maxReplicas=5))
    cluster = a_cluster(*pools, profiles={"a": fast, "b": slow}, backoffLimit=0).start()
    seen = []
    for _ in range(2 * MOST_TRIES):
        held = units_of(cluster)
        names = [name for name in cluster.members() if name in cluster.pods]
        if cluster.condition("LayoutPlanned")[0] == "False" or not names:
            break
        most = max(held.values())
        seen.append(tuple(sorted(held.values())))
        largest = next(name for name in names if held[name] == most)
        ran_out(cluster, largest)
    assert 3 <= len(seen) <= MOST_TRIES
    assert len(set(seen)) == len(seen), "no cut is tried twice"
    assert cluster.condition("LayoutPlanned") == ("False", "DoesNotFit")
    assert "Pool a ran out of memory" in cluster.message("LayoutPlanned")
    assert cluster.condition("Stalled")[0] == "True"
    assert (cluster.status["restarts"], cluster.condition("Failed")[0]) == (0, "False")


def test_the_number_of_smaller_limits_is_bounded() -> None:
    """After the last one the pool holds nothing, however small the planned parts were."""
    memory = {"limitBytes": 5 * STATE, "tries": MOST_TRIES, "usableBytes": 5 * STATE}
    cluster = a_cluster(*TWO_OF_A, profiles={"a": profile("a", units_that_fit=5)})
    cluster.job["status"] = {"internal": {"pools": [{"name": "a", "memory": memory}]}}
    cluster.start()
    assert len(plan_of(cluster).ranks) == 2
    ran_out(cluster, "job-w0")
    assert cluster.condition("LayoutPlanned") == ("False", "DoesNotFit")
    assert "Pool a ran out of memory 9 times and holds nothing of the model" in cluster.message("LayoutPlanned")


def test_two_workers_of_one_plan_teach_the_same() -> None:
    cluster = a_cluster(pool("a", maxReplicas=3), profiles={"a": profile("a", units_that_fit=2.5)}).start()
    assert set(units_of(cluster).values()) == {2}
    for name in ("job-w0", "job-w1"):
        cluster.end(name, exit_code=137, reason="OOMKilled")
        cluster.step()
    (kept,) = cluster.status["internal"]["pools"]
    assert kept["memory"]["tries"] == 1
    assert cluster.status["restarts"] == 0


@pytest.mark.parametrize("case", ["more memory", "suspended", "as before"])
def test_a_limit_is_forgotten_where_the_pool_has_more_memory_or_the_job_was_suspended(case: str) -> None:
    profiles = {"a": profile("a", units_that_fit=3.5)}
    cluster = a_cluster(*TWO_OF_A, profiles=profiles).start()
    ran_out(cluster, "job-w0")
    assert cluster.condition("LayoutPlanned") == ("False", "DoesNotFit")
    if case == "more memory":
        cluster.telemetry = Telemetry(profiles={"a": profile("a", units_that_fit=4)})
    elif case == "suspended":
        cluster.edit(lambda spec: spec.update(suspend=True)).settle()
        cluster.edit(lambda spec: spec.update(suspend=False)).settle()
        cluster.schedule().run()
    cluster.settle()
    assert (cluster.condition("LayoutPlanned")[0] == "True") is (case != "as before")


def test_a_rule_of_the_failure_policy_says_what_such_an_end_counts_as() -> None:
    rules = {"rules": [{"action": "Restart", "onReasons": ["OOMKilled"]}]}
    cluster = a_cluster(*TWO_OF_A, profiles={"a": profile("a", units_that_fit=5)}, failurePolicy=rules).start()
    ran_out(cluster, "job-w0", how="kernel")
    assert cluster.status["restarts"] == 1
    (kept,) = cluster.status["internal"]["pools"]
    assert kept["memory"]["limitBytes"] < 3 * STATE, "the next plan is another one all the same"


def test_memory_that_runs_out_without_a_planned_stage_is_a_failure_as_any() -> None:
    """Before the first plan, and with the whole model on every rank."""
    cluster = a_cluster(profiles={}).start()
    ran_out(cluster, "job-w0", how="kernel")
    assert cluster.status["restarts"] == 1
    whole = a_cluster(parallelism={"mode": "Data"}).start()
    ran_out(whole, "job-w0", how="kernel")
    assert whole.status["restarts"] == 1


def test_the_allocation_values_devices_with_the_same_memory() -> None:
    multi = MultiJobCluster().with_nodes("a", cpu="2")
    job = multi.add("job", pool("a", maxReplicas=2), parallelism={"mode": "Pipeline"})
    job.telemetry = Telemetry(profiles={"a": profile("a", units_that_fit=5)})
    multi.settle()
    job.job["status"]["internal"] = {
        "pools": [{"name": "a", "memory": {"limitBytes": 2 * STATE, "tries": 1, "usableBytes": 5 * STATE}}]
    }
    (competition,) = multi.competitions()
    (competitor,) = competition.competitors
    problem = _problem(competitor)
    assert problem is not None
    assert problem.kinds[0].memory_bytes == 2 * STATE
    free = replace(competitor, telemetry=Telemetry(profiles={"a": profile("a", units_that_fit=6)}))
    forgotten = _problem(free)
    assert forgotten is not None
    assert forgotten.kinds[0].memory_bytes == 6 * STATE


def lost_its_state(**spec: object) -> FakeCluster:
    """Return a job whose stage was killed after the first step, and whose other workers then hold too little."""
    profiles = {"a": profile("a", units_that_fit=5), "b": profile("b", units_that_fit=3.5, slowness=2)}
    cluster = a_cluster(profiles=profiles, backoffLimit=0, **spec).start()
    ran_out(cluster, "job-w0", how="kernel")
    assert sorted(units_of(cluster)) == ["job-w1", "job-w2"]
    for name in ("job-w1", "job-w2"):
        why = "the ranks that are left do not hold the whole training state of step 7 together"
        cluster.end(name, Ending.FAILED, exit_code=1, reason=why, cause=Cause.STATE_LOST)
        cluster.step()
    cluster.settle()
    cluster.pass_time(60).settle()
    cluster.schedule().run()
    cluster.settle()
    return cluster


def test_a_job_without_a_checkpoint_begins_again_when_a_part_of_the_state_was_lost() -> None:
    """The end of the lost worker counts as what it is; those of the workers that hold the rest count nothing."""
    cluster = lost_its_state()
    assert units_of(cluster) == {"job-w3": 3, "job-w4": 3}
    assert (cluster.status["restarts"], cluster.condition("Failed")[0]) == (0, "False")
    assert cluster.events.count("TrainingBeginsAgain") >= 1
    assert "WorkerFailed" not in cluster.events
    assert cluster.status["lastFailure"].startswith("training begins again: the ranks that are left")
    assert "nodesWithFailures" not in cluster.status or not cluster.status["nodesWithFailures"]


def test_a_rule_may_end_a_job_that_would_begin_again() -> None:
    rules = {"rules": [{"action": "Fail", "onReasons": ["StateLost"]}]}
    assert lost_its_state(failurePolicy=rules).condition("Failed") == ("True", "FailurePolicy")
