"""``heterotrain-run`` in a job with ``runtime: Torchrun``: runs an unchanged script in the world of the newest plan.

The launcher takes the place of torchrun's elastic agent, with the operator's plan instead of a rendezvous. A new
generation ends the script's processes in all pods and starts them again in the new world; the script continues from its
own checkpoint, as it does under torchrun. The launcher reports readiness and the plan in force, and writes the outcome.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from heterotrain_core.contract import env
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, encode_outcome

from heterotrain.errors import UsageError
from heterotrain.identity import Identity, read_config, read_identity
from heterotrain.membership.plan_source import PlanSource
from heterotrain.telemetry.logs import set_up_logs
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.serving import serve
from heterotrain.torchrun.peers import LauncherState, StateServer, absent, tell_finished
from heterotrain.torchrun.processes import Processes
from heterotrain.torchrun.world import World, commands, world_of

_log = logging.getLogger(__name__)

KILL_AFTER_S = 20.0
"""Processes that were asked to end are killed after this time, or earlier if the pod's grace period is shorter."""
GRACE_PART = 0.8
"""Part of the grace period after which processes are killed, so that the outcome can still be written."""
POLL_S = 0.1
LOST_SENTENCE = "received SIGTERM"


class TorchrunLauncher:
    """Runs one worker's processes, generation after generation."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self._arguments = list(arguments)
        self._environ = dict(environ)
        self._identity: Identity = read_identity(environ)
        config = read_config(environ)
        grace_s = config.grace_s if config is not None else 30.0
        self._kill_after_s = min(KILL_AFTER_S, GRACE_PART * grace_s)
        self._question_s = config.peer_timeout_s if config is not None else 3.0
        self._plans = PlanSource(self._identity.plan_dir, job_uid=self._identity.job_uid)
        self._told = threading.Event()
        self._others_finished = threading.Event()
        self._reports = [RankMetrics(_rank(self._identity, r)) for r in range(self._identity.num_proc_per_worker)]

    def run(self) -> int:
        """Run until the script ends or the pod has to leave; write the outcome and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Last to first: rank 0's port is what the kubelet asks.
        servers = [serve(report, _rank(self._identity, r)) for r, report in reversed([*enumerate(self._reports)])]
        state = StateServer(
            self._identity,
            lambda: LauncherState.LEAVING if self._told.is_set() else LauncherState.THERE,
            on_finished=self._others_finished.set,
        )
        self._plans.start()
        for report in self._reports:
            report.gauges({names.READY: 1.0})
        try:
            outcome = self._generations()
        finally:
            self._plans.close()
            for server in (*servers, state):
                if server is not None:
                    server.shutdown()
        _log.info("%s: %s", outcome.ending, outcome.reason)
        path = self._identity.termination_path
        if path is not None:
            with contextlib.suppress(OSError):
                Path(path).write_text(encode_outcome(outcome), encoding="utf-8")
        return 1 if outcome.ending is Ending.FAILED else 0

    def _generations(self) -> Outcome:
        done = 0
        while True:
            world = self._next_world(after=done)
            if world is None:
                return self._left()
            done = world.generation
            outcome = self._one_generation(world)
            if outcome is not None:
                return outcome

    def _next_world(self, *, after: int) -> World | None:
        """Wait for a world of a later generation with this worker; ``None`` when the worker has to leave first."""
        while not self._told.is_set():
            held = self._plans.newest
            if held is not None and held.plan.generation > after:
                world = world_of(held.plan, worker_uid=self._identity.worker_uid, run_id=self._identity.job_name)
                if world is not None:
                    return world
            self._told.wait(POLL_S)
        return None

    def _one_generation(self, world: World) -> Outcome | None:
        """Run the script in this world; return the worker's outcome, or ``None`` when another world follows."""
        processes = self._start(world)
        while not processes.ended and not processes.failed:
            if self._told.is_set():
                self._end(processes, "the pod has to end")
                return self._left()
            if self._replaced(world):
                self._end(processes, "the membership has changed")
                return None
            self._report_revision()
            processes.reap()
            time.sleep(POLL_S)
        if not processes.failed:
            tell_finished(world.others, self._identity.secret, timeout_s=self._question_s)
            reason = "the script for torchrun ended with exit code 0"
            return Outcome(ending=Ending.FINISHED, reason=reason, epoch=0, step=0, cause=Cause.TORCHRUN_SCRIPT)
        reason = processes.failure()
        self._end(processes, reason)
        return self._after_failure(world, reason)

    def _start(self, world: World) -> Processes:
        _log.info(
            "generation %d: rank %d to %d of %d, rendezvous at %s port %d",
            world.generation, world.ranks[0].rank, world.ranks[-1].rank, world.world_size, *world.master,
        )  # fmt: skip
        # Without the operator's variables: a script that uses this library then takes its ranks from torchrun's, too.
        base = {k: v for k, v in self._environ.items() if not k.startswith(env.PREFIX) or k in env.USER_SETTABLE}
        if len(world.ranks) > 1:
            base.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        processes = Processes()
        for command, variables in commands(self._arguments, world, python=sys.executable):
            processes.start(command, base | variables)
        for report in self._reports:
            report.gauges({names.PLAN_GENERATION: world.generation, names.WORLD_SIZE: world.world_size})
        self._report_revision()
        return processes

    def _report_revision(self) -> None:
        held = self._plans.newest
        if held is not None:
            for report in self._reports:
                report.gauges({names.PLAN_REVISION: held.plan.revision})

    def _replaced(self, world: World) -> bool:
        """Return whether a newer plan asks for another world, or asks this worker to leave."""
        held = self._plans.newest
        if held is None:
            return False
        return held.plan.generation > world.generation or self._identity.worker in held.plan.drain

    def _after_failure(self, world: World, reason: str) -> Outcome | None:
        """Return the failure if the script is the reason; ``None`` once the next world replaces it."""
        missing = absent(world.others, self._identity.secret, timeout_s=self._question_s)
        if not missing or self._others_finished.is_set():
            if self._told.is_set() or self._replaced(world):
                return self._left() if self._told.is_set() else None
            return Outcome(ending=Ending.FAILED, reason=reason, epoch=0, step=0)
        _log.warning("%s, but %s left or is lost: waiting for the next plan", reason, ", ".join(missing))
        while not self._told.wait(POLL_S):
            if self._replaced(world):
                return None
            if self._others_finished.is_set():  # the script has ended elsewhere, so no plan will follow
                return Outcome(ending=Ending.FAILED, reason=reason, epoch=0, step=0)
        return self._left()

    def _end(self, processes: Processes, why: str) -> None:
        """End all processes of the pod."""
        _log.info("ending the processes of the worker: %s", why)
        processes.terminate()
        deadline_s = time.monotonic() + self._kill_after_s
        while not processes.ended:
            if time.monotonic() > deadline_s:
                _log.warning("they did not end within %.0f s: killing them", self._kill_after_s)
                processes.kill()
                deadline_s = float("inf")
            processes.reap()
            time.sleep(POLL_S / 10)

    def _left(self) -> Outcome:
        return Outcome(ending=Ending.LEFT, reason=LOST_SENTENCE, epoch=0, step=0, told=True)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._told.set()


def _rank(identity: Identity, local_rank: int) -> Identity:
    """Return the identity under which one rank's numbers are reported; none asks the others for readiness."""
    port = identity.metrics_port
    return replace(
        identity,
        local_rank=local_rank,
        num_proc_per_worker=1,
        metrics_port=None if port is None else port + local_rank,
    )


def run(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run a script for torchrun as this worker; return the pod's exit code."""
    known = {"worker": env.WORKER, "job": env.JOB_NAME, "namespace": env.JOB_NAMESPACE}
    set_up_logs({tag: environ[name] for tag, name in known.items() if name in environ}, environ=environ)
    try:
        return TorchrunLauncher(arguments, environ).run()
    except (UsageError, OSError) as error:
        _log.error("%s", error)
        path = environ.get(env.TERMINATION_PATH, env.DEFAULT_TERMINATION_PATH)
        outcome = Outcome(ending=Ending.FAILED, reason=str(error), epoch=0, step=0)
        with contextlib.suppress(OSError):
            Path(path).write_text(encode_outcome(outcome), encoding="utf-8")
        return 1
