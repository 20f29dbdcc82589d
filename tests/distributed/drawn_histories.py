"""Seeded histories: what a seed decides, and how an operator of a test acts at the steps that it decides for.

A seed repeats its history: each decision has a random stream of its own, named by what it is about, and none depends on
how often or when the test looked. Acts of the operator belong to steps: the ranks wait at the beginning of such a step
until the operator has acted. What they wait for does not depend on the machine's speed.

The gate plays the same seeds every time. ``REPEAT=all`` plays many, from another first seed in each run (``SEED``). The
variable ``HISTORIES`` names the seeds, as in ``HISTORIES=100:200``; a failed test has its seed in its name.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from distributed.harness import LIMIT_S, Gate, Operator, Worker
from distributed.scripts import batches
from support import patience, repeat
from support.lineage import lineage

VARIABLE: Final = "HISTORIES"
JOIN, PLAN, END = "join", "plan", "end"
"""What the operator does at a step: start another worker, make another plan, or end all workers."""


def seeds(*, gate: int, every: int) -> range:
    """Return the seeds to play: as many as the gate or the long run plays, or those that ``HISTORIES`` names."""
    if asked := os.environ.get(VARIABLE):
        return range(*map(int, asked.split(":")))
    if not repeat.is_thorough():
        return range(gate)
    first = repeat.first_seed(gate=0)
    return range(first, first + every)


@dataclass(frozen=True, slots=True)
class Draws:
    """The decisions of a seed."""

    seed: int

    def __call__(self, *about: object) -> random.Random:
        """Return the random stream of one decision."""
        return random.Random(f"{self.seed} {about}")  # noqa: S311  # a seeded scenario, not a secret

    def chance(self, probability: float, *about: object) -> bool:
        """Return whether something happens."""
        return self(*about).random() < probability


@dataclass(slots=True, eq=False)
class Pod:
    """A worker, with one rank or with several that divide the model."""

    ranks: list[Worker]

    @property
    def name(self) -> str:
        """Return the worker's name."""
        return self.ranks[0].name

    @property
    def codes(self) -> list[int | None]:
        """Return the exit codes of its ranks."""
        return [rank.poll() for rank in self.ranks]

    @property
    def has_ended(self) -> bool:
        """Return whether one of its ranks has ended."""
        return any(code is not None for code in self.codes)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, as the launcher does."""
        for rank in self.ranks:
            rank.signal(number)


@dataclass(slots=True)
class History:
    """A job, and an operator that answers to losses and leaves, and acts at given steps.

    Attributes:
        operator: starts workers and writes plans.
        draw: the decisions.
        start: starts the worker of this number, with these gates.
        plan: writes a plan for these workers, by this random stream.
        acts: what the operator does at the beginning of a step.
        late_s: patience after a loss, in which the survivors may go on before the operator answers; it does at once, or
            when they have gone on, or after this time.
        prompt: whether the operator answers to announced leaves, too.
        replaces: probability that a worker that is gone gets a successor.
        most: number of workers after which no more join, except for the only one.
        name: of this part of the history.
    """

    operator: Operator
    draw: Draws
    start: Callable[[int, list[dict[str, Any]]], Pod]
    plan: Callable[[random.Random, list[Pod]], None]
    acts: Mapping[int, str]
    late_s: float
    prompt: bool = False
    replaces: float = 0.5
    most: int = 12
    name: str = ""
    everyone: list[Pod] = field(default_factory=list)
    living: list[Pod] = field(default_factory=list)
    _gates: dict[int, Gate] = field(default_factory=dict)

    def add(self) -> Pod:
        """Start another worker, and wait until it is ready."""
        if not self._gates:
            self._gates = {step: Gate(self.operator.folder, step, name=self.name) for step in sorted(self.acts)}
        pod = self.start(len(self.everyone), [gate.fault for gate in self._gates.values()])
        self.everyone.append(pod)
        self.living.append(pod)
        return pod

    def play(self) -> bool:
        """Play it; return whether the training has finished."""
        self._plan()
        limit_s = patience.now_s() + LIMIT_S
        while not any(self.has_finished(pod) for pod in self.living):
            assert patience.now_s() < limit_s, self.operator.evidence()
            lost = self._take_lost()
            if any(self.has_finished(pod) for pod in lost):
                return True
            asked = [pod for pod in self.living if self.prompt and asked_file(self.operator, pod.name).exists()]
            gate = next((step for step, gate in self._gates.items() if gate.reached() and not gate.is_open()), None)
            if not lost and not asked and gate is None:
                time.sleep(0.02)
                continue
            act = self.acts.get(gate, "") if gate is not None else ""
            if act == END:
                note(self.operator, step=gate, do=act)
                return self.end()
            self.living = [pod for pod in self.living if pod not in asked]
            if lost and gate is None:
                self._wait_for_survivors(lost)
            self._fill(act, [*lost, *asked])
            self._plan()
            if gate is not None:
                note(self.operator, step=gate, do=act)
                self._gates[gate].open()
        return True

    def end(self, number: signal.Signals | None = None) -> bool:
        """End all workers, as if the job was suspended or all nodes were lost; return whether it had finished."""
        kinds = [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
        number = number or self.draw("the end", self.name).choice(kinds)
        for pod in self.living:
            pod.end(number)
        for gate in self._gates.values():
            gate.open()
        self.operator.finish([rank for pod in self.living for rank in pod.ranks])
        return any(self.has_finished(pod) for pod in self.living)

    def has_finished(self, pod: Pod) -> bool:
        """Return whether a rank of the worker has reached the end of the training."""
        return any(result_of(self.operator, rank, number).exists() for number, rank in enumerate(pod.ranks))

    def _take_lost(self) -> list[Pod]:
        """Take workers of which a rank is gone from the living ones; they end as a whole, like a pod."""
        lost = [pod for pod in self.living if pod.has_ended]
        for pod in lost:
            pod.end(signal.SIGTERM if any(code == 0 for code in pod.codes) else signal.SIGKILL)
            self.operator.finish(pod.ranks)
        self.living = [pod for pod in self.living if pod not in lost]
        return lost

    def _wait_for_survivors(self, lost: list[Pod]) -> None:
        before = steps_of(self.living)
        late = self.draw.chance(0.5, "the operator is late after", lost[0].name)
        end_s = patience.now_s() + self.late_s * late
        while patience.now_s() < end_s and steps_of(self.living) <= before:
            time.sleep(0.02)

    def _fill(self, act: str, gone: list[Pod]) -> None:
        replaces = any(self.draw.chance(self.replaces, "is replaced", pod.name) for pod in gone)
        if not self.living or ((act == JOIN or replaces) and len(self.everyone) < self.most):
            self.operator.until_ready(*self.add().ranks)
        there = [pod for pod in self.living if not pod.has_ended]
        if there:  # else the next look finds them
            self._take_lost()

    def _plan(self) -> None:
        self.plan(self.draw("plan", self.name, [pod.name for pod in self.living]), self.living)


def asked_file(operator: Operator, name: str) -> Path:
    """Return the file that exists when a worker was asked to leave."""
    return operator.folder / f"asked-{name}"


def result_of(operator: Operator, rank: Worker, number: int) -> Path:
    """Return the file that a rank writes at the end of the training."""
    return operator.folder / f"{rank.name}-{number}.pt"


def steps_of(pods: list[Pod]) -> float:
    """Return the committed steps."""
    return max((pod.ranks[0].metric("heterotrain_step") or 0.0 for pod in pods), default=0.0)


def in_own_folder(operator: Operator, name: str) -> Operator:
    """Let a history play in a folder of its own, so that a test can play several."""
    operator.folder = operator.folder / name
    operator.folder.mkdir()
    return operator


def drawn_fault(
    rng: random.Random, operator: Operator, name: str, place: str, *, last: int, kinds: list[str], tells: bool = False
) -> dict[str, Any]:
    """Return a fault of a worker at a place, in any step or visit up to ``last``, which is recorded when it happens.

    ``tells``: a file tells the operator when the worker is asked to leave.
    """
    do = rng.choice(kinds)
    told = {"reached": str(asked_file(operator, name))} if tells and do == "leave" else {}
    return {"place": place, "step": rng.randint(0, last), "do": do, "record": str(operator.folder / "faults")} | told


def note(operator: Operator, **act: Any) -> None:
    """Record what the operator did."""
    with (operator.folder / "faults").open("a") as file:
        file.write(json.dumps(act) + "\n")


def check_samples(operator: Operator, *, epochs: int, samples: int) -> None:
    """Fail unless each sample has entered the weights once in each epoch, in the order of one process."""
    orders: dict[int, list[int]] = {}
    for epoch, chosen in batches(epochs=epochs, samples=samples):
        orders.setdefault(epoch, []).extend(chosen)
    assert lineage(operator.folder / "samples") == orders


def faults_of(operator: Operator) -> list[dict[str, Any]]:
    """Return the faults that happened (step or visit, place, kind and victim) and what the operator did at a step."""
    path = operator.folder / "faults"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(rows, key=lambda row: sorted((key, str(value)) for key, value in row.items()))
