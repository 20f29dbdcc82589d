"""Errors of one job and bugs of the operator: other jobs go on, and the status tells them."""

from __future__ import annotations

import asyncio

import pytest
from heterotrain_operator.cluster_state.parse import (
    parse_job,
)
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide import job
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.inputs import JobInputs
from heterotrain_operator.engine import reconcile
from heterotrain_operator.engine.app import STUCK_S, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.queue import LONGEST_BACKOFF_S
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Unavailable
from support.fake_cluster import a_running_job, job_body
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, deliver_pods_and_plan


@pytest.mark.looptime
@pytest.mark.parametrize("error", [Unavailable("down"), Conflict("changed"), NotFound("gone"), RuntimeError("a bug")])
async def test_an_error_with_one_job_does_not_delay_another(error: Exception) -> None:
    kube = FakeKube()
    app = an_app(kube, network_policy=True)
    other = job_body()
    other["metadata"] |= {"name": "good", "uid": "other"}
    kube.objects["heterotrainjobs", "ns", "good"] = other
    app.store.jobs.put(parse_job(other))

    def fail(_verb: str, plural: str, name: str) -> KubeError | None:
        if plural == "networkpolicies" and name == "job-workers":
            raise error
        return None

    kube.fail = fail
    app.queue.add(KEY)
    app.queue.add(JobKey("ns", "good"))
    worker = asyncio.create_task(app.reconciler.work(app.queue.get))
    await asyncio.sleep(0.01)
    assert ("merge status", "heterotrainjobs", "good") in kube.writes
    assert not worker.done(), "the loop survives"
    before = len([call for call in kube.calls if call == ("get", "networkpolicies", "job-workers")])
    await asyncio.sleep(30)
    tries = len([call for call in kube.calls if call == ("get", "networkpolicies", "job-workers")])
    assert before < tries < 12, "it is tried again, less and less often"
    worker.cancel()


def internal_errors(app: App, part: str) -> float:
    return app.metrics.internal_errors.labels(part=part)._value.get()


@pytest.mark.looptime
async def test_a_pass_that_fails_by_a_bug_is_reported_in_the_status_and_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kube, cluster = FakeKube(), a_running_job()
    app = an_app(kube, cluster)

    def broken(_: JobInputs) -> Decision:
        raise ZeroDivisionError("x" * 5000)

    monkeypatch.setattr(reconcile, "decide", broken)
    app.queue.add(KEY)
    worker = asyncio.create_task(app.reconciler.work(app.queue.get))
    for _ in range(60):
        await asyncio.sleep(1.0)
        app.queue.add_news(KEY)  # a scrape
    conditions = {c["type"]: c for c in kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]}
    assert (conditions["Stalled"]["status"], conditions["Stalled"]["reason"]) == ("True", "InternalError")
    assert (conditions["Ready"]["status"], conditions["Running"]["status"]) == ("False", "True")
    assert "ZeroDivisionError" in conditions["Stalled"]["message"]
    assert len(conditions["Stalled"]["message"]) < 500
    assert 2 <= internal_errors(app, "what to do") < 10
    assert app.reconciler._memories[KEY].logged_fault
    monkeypatch.undo()
    await asyncio.sleep(1.2 * LONGEST_BACKOFF_S + 1.0)  # the jitter lengthens a delay by 20 % at most
    conditions = {c["type"]: c for c in kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]}
    assert conditions["Stalled"]["status"] == "False"
    worker.cancel()


async def test_a_part_that_fails_by_a_bug_is_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kube, cluster = FakeKube(), a_running_job()
    app = an_app(kube, cluster)
    deliver_pods_and_plan(app, kube, cluster)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(job, "decide_replicas", broken)
    for _ in range(3):
        assert await app.reconciler.handle(KEY) == "bug"
        found = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
        assert next(c["status"] for c in found if c["type"] == "Stalled") == "True"
    assert internal_errors(app, "the number of workers") == 3
    assert capsys.readouterr().out.count("Traceback") == 1
    monkeypatch.undo()
    assert await app.reconciler.handle(KEY) == "ok"


@pytest.mark.looptime
async def test_an_operator_with_a_pass_that_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    app = an_app(FakeKube(), clocks=Clocks(monotonic=loop.time))
    app._synced.set()
    forever = asyncio.Event()
    monkeypatch.setattr(app.actor, "act", lambda *_: forever.wait())
    app.queue.add(KEY)
    worker = asyncio.create_task(app.reconciler.work(app.queue.get))
    await asyncio.sleep(STUCK_S - 1.0)
    app._listed_s = loop.time()
    assert app.healthy
    await asyncio.sleep(2.0)
    assert not app.healthy
    forever.set()
    await asyncio.sleep(1.0)
    assert app.healthy, "the pass has ended"
    worker.cancel()
