"""The learner: it holds up no pass, uses a bounded part of one core, and a bug with one job's data stays with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, ValidJob
from heterotrain_operator.decide.learn.job_model import JobModel
from heterotrain_operator.decide.plan.revision import BURST, INTERVAL_S
from heterotrain_operator.engine import learner
from heterotrain_operator.engine.app import CLOCKS, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.learner import FAULT_REST_S, JOB_PART, PART
from heterotrain_operator.settings import Settings
from heterotrain_operator.threads import Threads
from support.executors import ByHand, at_once
from support.fake_cluster import FakeCluster, a_running_job, job_body
from support.fakes import FakeKube
from support.operator_app import KEY, condition, deliver_pods_and_plan
from support.operator_app import an_app as app_of_one_job
from support.waiting import until

FIRST, SECOND = JobKey("ns", "first"), JobKey("ns", "second")


def an_app(*keys: JobKey, clocks: Clocks = CLOCKS, threads: Threads | None = None) -> App:
    """Return an operator with these jobs."""
    kube = FakeKube()
    app = App(kube, Settings(leader_election=False), threads=threads or at_once(), clocks=clocks)
    for key in keys:
        body = job_body()
        body["metadata"] |= {"name": key.name, "uid": f"uid-{key.name}"}
        kube.objects["heterotrainjobs", key.namespace, key.name] = body
        app.store.jobs.put(parse_job(body))
    return app


def job_of(app: App, key: JobKey) -> ValidJob:
    job = app.store.jobs.get(key)
    assert isinstance(job, ValidJob)
    return job


def note(app: App, key: JobKey, sequence: int) -> bool:
    """Let new telemetry of a job arrive."""
    known = app.reconciler._sources.telemetry_of
    newest = Telemetry(sequence=sequence)
    app.reconciler._sources = replace(
        app.reconciler._sources, telemetry_of=lambda job: newest if job.key == key else known(job)
    )
    return app.learner.note(job_of(app, key), newest)


def learns_in(monkeypatch: pytest.MonkeyPatch, takes: Callable[[ValidJob], None]) -> None:
    """Replace what is learned by the version of what it was learned for."""

    def learned(job: ValidJob, _plan: object, telemetry: Telemetry, before: JobModel) -> JobModel:
        takes(job)
        return replace(before, learned_for=(job.generation, telemetry.sequence))

    monkeypatch.setattr(learner, "learn", learned)


async def test_passes_go_on_while_a_job_is_learned_from() -> None:
    """Over other jobs and over the job itself, which has its earlier model until then."""
    executor = ByHand()
    app = an_app(FIRST, SECOND, threads=Threads(executor))
    assert note(app, FIRST, 1)
    learning = asyncio.create_task(app.learner.learn_next())
    await until(lambda: executor.waiting == 1, "a fit", every_s=0.0)
    for key in (FIRST, SECOND):
        await app.reconciler.run_once(key)
    assert not learning.done()
    assert app.learner.model_of(job_of(app, FIRST)).learned_for[1] < 1
    executor.step()
    await learning
    assert app.learner.model_of(job_of(app, FIRST)).learned_for[1] == 1
    assert await app.queue.get() == FIRST, "a pass finds the new model"


@pytest.mark.looptime
async def test_fits_of_many_jobs_use_a_bounded_part_of_a_core_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred jobs have news each five seconds, and each fit takes 70 ms: all of them get their turns."""
    took_s, every_s, span_s = 0.07, 5.0, 300.0
    loop, spent_s, fits = asyncio.get_running_loop(), [0.0], Counter[JobKey]()
    keys = [JobKey("ns", f"job-{number}") for number in range(100)]
    app = an_app(*keys, clocks=Clocks(monotonic=lambda: loop.time() + spent_s[0]))

    def takes(job: ValidJob) -> None:
        spent_s[0] += took_s
        fits[job.key] += 1

    learns_in(monkeypatch, takes)
    learning = asyncio.create_task(app.learner.run())
    for scrape in range(int(span_s / every_s)):
        for key in keys:
            note(app, key, scrape + 1)
        await asyncio.sleep(every_s)
    learning.cancel()
    assert spent_s[0] == pytest.approx(PART * (span_s + spent_s[0]), rel=0.02)
    assert min(fits.values()) >= 3
    assert max(fits.values()) <= 2 * min(fits.values()), "in turns"


@pytest.mark.looptime
async def test_a_large_job_rests_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, spent_s, learned = asyncio.get_running_loop(), [0.0], list[tuple[str, float]]()
    app = an_app(FIRST, SECOND, clocks=Clocks(monotonic=lambda: loop.time() + spent_s[0]))

    def takes(job: ValidJob) -> None:
        learned.append((job.key.name, app.learner._clocks.monotonic()))
        spent_s[0] += 0.5 if job.key == FIRST else 0.0

    learns_in(monkeypatch, takes)
    learning = asyncio.create_task(app.learner.run())
    for second in range(15):
        note(app, FIRST, second + 1)
        note(app, SECOND, second + 1)
        await asyncio.sleep(1.0)
    learning.cancel()
    large = [at_s for name, at_s in learned if name == "first"]
    assert len(large) == 2
    assert large[1] - large[0] >= 0.5 / JOB_PART
    assert len(learned) - len(large) >= 14


@pytest.mark.looptime
async def test_shares_that_alternate_with_each_scrape_lead_to_a_bounded_number_of_revisions() -> None:
    loop, cluster = asyncio.get_running_loop(), a_running_job()
    kube = FakeKube()
    app = app_of_one_job(kube, cluster, Clocks(monotonic=loop.time))
    deliver_pods_and_plan(app, kube, cluster)
    learned = 0

    def alternating(job: ValidJob, _plan: object, telemetry: Telemetry, before: JobModel) -> JobModel:
        nonlocal learned
        learned += 1
        cluster.learn()
        assert cluster.model.shares is not None
        shares = replace(cluster.model.shares, changed=True)
        return replace(before, learned_for=(job.generation, telemetry.sequence), shares=shares)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "learn", alternating)
        learning = asyncio.create_task(app.learner.run())
        for scrape in range(60):
            note(app, KEY, scrape + 1)
            await asyncio.sleep(1.0)
        learning.cancel()
    assert BURST <= learned <= BURST + 60 / INTERVAL_S


@pytest.mark.looptime
async def test_a_bug_with_one_job_is_reported_and_tried_seldom_while_others_are_learned_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, tries = asyncio.get_running_loop(), list[float]()
    kube, cluster = FakeKube(), a_running_job()
    app = app_of_one_job(kube, cluster, Clocks(monotonic=loop.time))
    deliver_pods_and_plan(app, kube, cluster)
    body = job_body()
    body["metadata"] |= {"name": SECOND.name, "uid": "second"}
    app.store.jobs.put(parse_job(body))

    def broken(job: ValidJob) -> None:
        if job.key == KEY:
            tries.append(loop.time())
            raise ZeroDivisionError

    learns_in(monkeypatch, broken)
    learning = asyncio.create_task(app.learner.run())
    for scrape in range(15):
        note(app, KEY, scrape + 1)
        note(app, SECOND, scrape + 1)
        await asyncio.sleep(5.0)
        assert app.learner.model_of(job_of(app, SECOND)).learned_for == (1, scrape + 1)
        await app.reconciler.handle(KEY)
        reason, message = condition(kube, "Stalled")
        assert (reason, "ZeroDivisionError" in message) == ("InternalError", True)
    assert len(tries) == 2
    assert tries[1] - tries[0] >= FAULT_REST_S
    assert app.metrics.internal_errors.labels(part="shares")._value.get() == 2
    assert capsys.readouterr().out.count("Traceback") == 1
    monkeypatch.undo()
    await asyncio.sleep(FAULT_REST_S)
    note(app, KEY, 100)
    await asyncio.sleep(1.0)
    await app.reconciler.handle(KEY)
    assert condition(kube, "Stalled")[0] != "InternalError"
    learning.cancel()


async def test_the_same_telemetry_is_learned_from_once_and_a_new_spec_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for no rest of the job and for no news of others."""
    clock_s, order = [0.0], list[JobKey]()
    app = an_app(FIRST, SECOND, clocks=Clocks(monotonic=lambda: clock_s[0]))

    def takes(job: ValidJob) -> None:
        order.append(job.key)
        clock_s[0] += 1.0

    learns_in(monkeypatch, takes)
    assert note(app, FIRST, 1)
    await app.learner.learn_next()
    assert not note(app, FIRST, 1)
    assert note(app, SECOND, 1)
    await app.learner.learn_next()
    clock_s[0] = 30.0
    assert note(app, SECOND, 2)
    clock_s[0] = 2.0
    body = job_body(generation=2)
    body["metadata"] |= {"name": FIRST.name, "uid": f"uid-{FIRST.name}", "resourceVersion": "2"}
    app.kube.objects["heterotrainjobs", FIRST.namespace, FIRST.name] = body  # type: ignore[attr-defined]  # a fake one
    app.store.jobs.put(parse_job(body))
    await app.reconciler.run_once(FIRST)
    await app.learner.learn_next()
    assert order == [FIRST, SECOND, FIRST]
    assert app.learner.model_of(job_of(app, FIRST)).learned_for == (2, 1)


async def test_a_new_operator_knows_what_the_status_keeps_and_a_new_job_of_the_name_nothing() -> None:
    cluster = FakeCluster()
    speed = {"name": "a", "speed": {"samples": 10, "perSampleSeconds": 0.01, "fixedSeconds": 0.1}}
    speed["speed"] |= {"backwardPerSampleSeconds": 0.02, "backwardFixedSeconds": 0.0, "updateSeconds": 0.0}
    cluster.job["status"] = {"internal": {"pools": [speed]}}
    app = app_of_one_job(FakeKube(), cluster)
    assert set(app.learner.model_of(job_of(app, KEY)).throughput.members) == {"a"}
    body = job_body()
    body["metadata"] |= {"uid": "another", "resourceVersion": "9"}
    app.store.jobs.put(parse_job(body))
    assert not app.learner.model_of(job_of(app, KEY)).throughput.members
