"""Seeded histories of jobs in acts, each under another parallelism from the checkpoint of the act before.

In each act, workers are lost, leave and join at random places. An act ends when all workers are asked to leave, or are
killed at once. Each history ends with the weights, the evaluations and the samples of one process.
``HETEROTRAIN_LAYOUT_HISTORIES`` sets the number of histories (``200``) or a range of seeds (``100:200``).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from distributed.fault_injectors import FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE, PHASE_PLACES, STAGE_PLACES
from distributed.harness import LIMIT_S, Operator, Worker
from distributed.test_divided_histories import LATE_S, members_of
from distributed.test_pipeline_jobs import BATCH, SAMPLES, SCRIPT, check_evaluations, plan_members, reference
from distributed.test_sharded_histories import Pod, has_finished, plan, result, start, steps_of
from heterotrain.data.order import permutation
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract.outcome import Ending

SEEDS = range(*map(int, os.environ.get("HETEROTRAIN_LAYOUT_HISTORIES", "3").split(":")))
EPOCHS = 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
MODES = ("Data", "Sharded", "Pipeline")
PAIRS = [(one, other) for one, other in itertools.product(MODES, MODES) if one != other]
"""Every order of two modes: one writes the checkpoint that the other reads."""
BY_STEP = ("step", "in loss", "backward", "reducing", "reduced", "applied")
PLACES = {
    "Data": (*BY_STEP, "in a hook", *FORMING_PLACES, LAST_PLACE),
    "Sharded": (*BY_STEP, *PHASE_PLACES, "in a hook", *FORMING_PLACES, LAST_PLACE),
    "Pipeline": (*BY_STEP, *STAGE_PLACES, *PHASE_PLACES, "in a hook", *FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE),
}
MOST_RANKS = 6
GRACE_S = 2.0


@cache
def expected() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return reference(epochs=EPOCHS)


@dataclass(slots=True)
class Act:
    """Part of a job under one parallelism; ``until`` is the step at which it ends, ``None`` for the job's end."""

    operator: Operator
    rng: random.Random
    mode: str
    until: int | None
    everyone: list[Pod]
    living: list[Pod] = field(default_factory=list)

    def play(self) -> bool:
        """Play it; return whether the training has finished."""
        operator, rng, end_s = self.operator, self.rng, time.monotonic() + LIMIT_S
        done = steps_of(self.everyone)
        faults = rng.randint(0, 2)
        for number in range(max(faults, rng.randint(1, 3))):
            self.add(self.fault(int(done)) if number < faults else None)
        prompt = rng.random() < 0.7  # whether the operator answers to announced leaves, or to ends only
        self.plan()
        while not any(has_finished(operator, pod) for pod in self.living):
            assert time.monotonic() < end_s, operator.evidence()
            if self.until is not None and steps_of(self.living) >= self.until:
                return self.end()
            lost = [pod for pod in self.living if any(code is not None for code in pod.codes)]
            asked = [pod for pod in self.living if self.asked(pod).exists() and pod not in lost] if prompt else []
            joins = not lost and not asked and len(self.everyone) < 12 and rng.random() < 0.02
            if not lost and not asked and not joins:
                time.sleep(0.02)
                continue
            self.remove(lost)
            if any(has_finished(operator, pod) for pod in lost):
                return True
            self.living = [pod for pod in self.living if pod not in (*lost, *asked)]
            before, late_s = steps_of(self.living), time.monotonic() + rng.choice([0.0, LATE_S])
            while lost and time.monotonic() < late_s and steps_of(self.living) <= before:
                time.sleep(0.02)
            if joins or not self.living or rng.random() < 0.5:
                self.add(None)
            gone = [pod for pod in self.living if any(code is not None for code in pod.codes)]
            if len(gone) < len(self.living):  # else the next look finds them
                self.remove(gone)
                self.living = [pod for pod in self.living if pod not in gone]
            self.plan()
        return True

    def fault(self, done: int) -> dict[str, Any]:
        """Return a fault at a place of this mode."""
        place = self.rng.choice(PLACES[self.mode])
        last = {"in a hook": EPOCHS - 1, LAST_PLACE: 0, HAND_OVER_PLACE: 0} | dict.fromkeys(FORMING_PLACES, 2)
        end = STEPS - 2 if self.until is None else self.until
        step = self.rng.randint(0, last[place]) if place in last else self.rng.randint(min(done, end), end)
        return {"place": place, "step": step, "do": self.rng.choice(["die", "die", "leave"])}

    def add(self, fault: dict[str, Any] | None) -> None:
        """Start a worker and wait until it is ready."""
        room = MOST_RANKS - sum(len(pod.ranks) for pod in self.living)
        size = self.rng.randint(1, max(1, min(3, room))) if self.mode == "Sharded" else 1
        name, faults = f"w{len(self.everyone)}", {}
        if fault is not None:
            reached = (
                {"reached": f"{self.operator.folder}/asked-{name}"} if fault["do"] == "leave" and size == 1 else {}
            )
            faults = {self.rng.randrange(size): fault | reached}
        pod = start(self.operator, name, size, faults, script=SCRIPT)
        self.everyone.append(pod)
        self.living.append(pod)
        self.operator.until_ready(*pod.ranks)

    def plan(self) -> None:
        """Give the living workers random members, shares and micro-batches."""
        if self.mode == "Sharded":
            plan(self.operator, self.rng, self.living)
            return
        workers = [pod.ranks[0] for pod in self.living]
        members, spares = members_of(self.rng, workers)
        if self.mode == "Data":
            members = [([worker], (), 1, self.rng.choice([0, 1, 3])) for worker in workers]
            edges = sorted(self.rng.sample(range(1, BATCH), len(workers) - 1))
            shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
            members = [(own, cuts, share, micro) for (own, cuts, _, micro), share in zip(members, shares, strict=True)]
            spares = []
        plan_members(self.operator, members, spares=spares)

    def asked(self, pod: Pod) -> Any:
        """Return the file that exists when a worker was asked to leave."""
        return self.operator.folder / f"asked-{pod.ranks[0].name}"

    def remove(self, pods: list[Pod]) -> None:
        """Let workers of which a rank is gone end: as a whole, like a pod."""
        for pod in pods:
            pod.end(signal.SIGTERM if any(code == 0 for code in pod.codes) else signal.SIGKILL)
            self.operator.finish(pod.ranks)

    def end(self) -> bool:
        """End all workers, as if the job was suspended, or all nodes were lost; return whether it had finished."""
        number = self.rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGKILL])
        for pod in self.living:
            pod.end(number)
        self.operator.finish([rank for pod in self.living for rank in pod.ranks])
        return any(has_finished(self.operator, pod) for pod in self.living)


@pytest.mark.parametrize("seed", SEEDS)
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Two to four acts, the first two of which are a pair of modes by the seed."""
    rng = random.Random(seed)  # noqa: S311  # a seeded scenario, not a secret
    modes = [*PAIRS[seed % len(PAIRS)], *rng.choices(MODES, k=rng.randint(0, 2))]
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, peer_timeout_s=1.0, grace_s=GRACE_S)
    checkpoints = {"checkpoint_uri": f"file://{operator.folder}/checkpoints", "checkpoint_interval_s": 0.0}
    pods: list[Pod] = []
    for number, mode in enumerate(modes, 1):
        operator.config = replace(operator.config, parallelism=mode, **checkpoints)
        until = None if number == len(modes) else STEPS * number // len(modes) - rng.randint(0, 2)
        act = Act(operator, rng, mode, until, pods)
        if act.play():
            break
    for pod in act.living:
        pod.end(signal.SIGTERM)
    operator.finish([rank for pod in act.living for rank in pod.ranks])
    check(operator, pods)


def check(operator: Operator, pods: list[Pod]) -> None:
    """Check what all ranks ended with."""
    (weights, evaluated), checked = expected(), 0
    for rank, number in [(rank, number) for pod in pods for number, rank in enumerate(pod.ranks)]:
        check_end(rank)
        path = result(operator, rank, number)
        if rank.poll() != 0 or not path.exists():
            continue
        checked += 1
        found = torch.load(path, weights_only=True)
        for name, part in found["parts"].items():
            first, stop = found["places"][name]
            torch.testing.assert_close(
                part.reshape(-1),
                weights[name].reshape(-1)[first:stop],
                rtol=1e-10,
                atol=1e-10,
                msg=f"{rank.uid} {name}",
            )
        check_evaluations(found["found"], evaluated)
    assert checked, operator.evidence()
    orders = {
        epoch: permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True).tolist() for epoch in range(EPOCHS)
    }
    assert lineage(operator.folder / "samples") == orders


def check_end(rank: Worker) -> None:
    """No worker fails by itself; SIGTERM may come before its handler is set."""
    assert rank.poll() in (0, -signal.SIGKILL, -signal.SIGTERM), rank.log()
    assert rank.outcome is None or rank.outcome.ending is not Ending.FAILED, rank.log()
