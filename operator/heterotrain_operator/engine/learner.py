"""Learns from the telemetry of all jobs, one after the other, in a thread: passes find the result as a value.

A fit takes 0.1 ms for each observation. Among hundreds of jobs, fits for each scrape would fill cores, and training
does not need them: the next scrape brings better evidence. So fits use a bounded part of one core, and jobs take turns.
A large job rests longer, and so does one whose shares change all the time, because each revision patches its pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog
from heterotrain_planner.planning.kept_speed import KeptSpeed

from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView, ValidJob
from heterotrain_operator.decide.faults import Fault
from heterotrain_operator.decide.learn.job_model import JobModel, known_from, learn, starting_with
from heterotrain_operator.decide.plan.plan import read_plan
from heterotrain_operator.decide.plan.revision import RevisionBudget
from heterotrain_operator.engine.clocks import BusyTime, Clocks
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.status_writer import EARLY_S
from heterotrain_operator.threads import Threads

PART = 0.4
"""Part of one core for the fits of all jobs together."""
JOB_PART = 0.05
"""Part of one core for the fits of a single job, however large it is."""
FAULT_REST_S = 60.0
"""Seconds after which a job is learned from again whose telemetry led to a bug: it would come back with each scrape."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """A job; losing this does no harm.

    Attributes:
        uid: the job's uid, because a new job may take the name of a deleted one.
        model: what is known about it.
        telemetry: its newest telemetry.
        due_s: the job rests until this time, on the monotonic clock.
        revisions: how many times its plan may be revised now.
    """

    uid: str
    model: JobModel
    telemetry: Telemetry = field(default_factory=Telemetry)
    due_s: float = float("-inf")
    revisions: RevisionBudget = field(default_factory=RevisionBudget)


class Learner:
    """Keeps the model of every job, and queues a job whose model is new.

    Attributes:
        busy: how long the present fit has gone on.
    """

    def __init__(
        self, store: Store, queue: Queue[JobKey], metrics: OperatorMetrics, *, clocks: Clocks, threads: Threads
    ) -> None:
        self._store = store
        self._queue = queue
        self._metrics = metrics
        self._clocks = clocks
        self._threads = threads
        self.busy = BusyTime(clocks.monotonic)
        self._jobs: dict[JobKey, _Known] = {}
        self._waiting: dict[JobKey, None] = {}
        """Jobs with something new, in the order of their turns."""
        self._wake = asyncio.Event()

    def model_of(self, job: JobView) -> JobModel:
        """Return what is known about a job."""
        return self._of(job).model

    def note(self, job: JobView, telemetry: Telemetry) -> bool:
        """Learn soon from a job's telemetry and spec, if they are new; return whether they are."""
        known = self._of(job)
        known.telemetry = telemetry
        if not isinstance(job, ValidJob) or known.model.learned_for == (job.generation, telemetry.sequence):
            return False
        if known.model.learned_for[0] != job.generation:  # a user waits for it
            known.due_s = float("-inf")
            self._waiting = {job.key: None, **self._waiting}
        self._waiting.setdefault(job.key)
        self._wake.set()
        return True

    def start_with(self, job: JobView, speeds: Mapping[str, KeptSpeed], origin: str) -> None:
        """Take the speeds by pool of an earlier job, which come from there, unless the job has learned its own."""
        known = self._of(job)
        known.model = starting_with(known.model, speeds, origin)

    def forget(self, key: JobKey) -> None:
        """Drop a job that no longer exists."""
        self._jobs.pop(key, None)
        self._waiting.pop(key, None)

    async def run(self) -> None:
        """Learn until cancelled."""
        while True:
            took_s = await self.learn_next()
            await asyncio.sleep(took_s * (1 / PART - 1))

    async def learn_next(self) -> float:
        """Wait for the next job and learn from it; return the seconds of processor time that it took."""
        while (key := self._next()) is None:
            self._wake.clear()
            rests_s = [self._jobs[each].due_s - self._clocks.monotonic() for each in self._waiting]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(rests_s, default=None)):
                    await self._wake.wait()
        del self._waiting[key]
        job = self._store.jobs.get(key)
        if not isinstance(job, ValidJob):
            return 0.0
        self.busy.progress()
        try:
            return await self._learn(job, self._of(job))
        finally:
            self.busy.rest()

    async def _learn(self, job: ValidJob, known: _Known) -> float:
        plan, telemetry, before = read_plan(job, self._store.plans.get(job.key)).plan, known.telemetry, known.model
        now_s = self._clocks.monotonic()

        def attempt() -> JobModel | Exception:
            try:
                return learn(job, plan, telemetry, before)
            except Exception as error:  # noqa: BLE001  # reported below; it must not end the operator
                return error

        found, took_s = await self._threads.run(self._clocks.timed, attempt)
        if known.model is not before:  # meanwhile, the speeds of an earlier job were found
            self._waiting.setdefault(job.key)
            return took_s
        known.model = self._failed(job, telemetry, before, found) if isinstance(found, Exception) else found
        if known.model.shares is not None and known.model.shares.changed:
            known.revisions = known.revisions.spent(now_s)
        fault_s = FAULT_REST_S if known.model.fault else 0.0
        known.due_s = now_s + max(took_s / JOB_PART, known.revisions.wait_s(now_s), fault_s)
        self._queue.add_news(job.key)
        return took_s

    def _failed(self, job: ValidJob, telemetry: Telemetry, before: JobModel, error: Exception) -> JobModel:
        """Report an attempt that failed by a bug; return what was known before, with the error."""
        fault = Fault(part="shares", error=error, instead="training goes on without new measurements")
        self._metrics.internal_errors.labels(part=fault.part).inc()
        if fault.sentence != before.fault:
            log.error("learning failed by a bug", job=job.key.name, namespace=job.key.namespace, exc_info=error)
        return replace(before, learned_for=(job.generation, telemetry.sequence), shares=None, fault=fault.sentence)

    def _of(self, job: JobView) -> _Known:
        known = self._jobs.get(job.key)
        if known is None or known.uid != job.uid:
            self.forget(job.key)
            known = self._jobs[job.key] = _Known(uid=job.uid, model=known_from(job.status))
        return known

    def _next(self) -> JobKey | None:
        """Return the first job that need not rest."""
        now_s = self._clocks.monotonic()
        return next((key for key in self._waiting if self._jobs[key].due_s <= now_s + EARLY_S), None)
