"""Seeded histories of everything that can happen to a job, at every point of the step protocol.

Whatever happens, and however late the operator reacts, each history ends with the weights and the samples of an
undisturbed run. ``HETEROTRAIN_HISTORIES`` sets how many are played (more on a quiet machine).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from distributed.harness import LIMIT_S, Operator, Worker, assert_same_weights, reference
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import Boundary, BoundaryKind

HISTORIES = int(os.environ.get("HETEROTRAIN_HISTORIES", "12"))
EPOCHS = 3
STEPS = 18
PLACES = ("step", "launched", "backward", "reducing", "reduced", "applied", "building", "built")


@dataclass(slots=True)
class Story:
    """One history: who dies where, who is told to go when, who comes, and how slow the operator is."""

    chance: random.Random
    operator: Operator
    delay_s: float = 0.0
    events: list[tuple[int, str]] = field(default_factory=list)
    known: list[Worker] = field(default_factory=list)
    told_to_go: set[str] = field(default_factory=set)
    named: tuple[str, ...] = ()
    changed_s: float | None = None
    count: int = 0

    def begin(self) -> None:
        """Start the first workers, some of them doomed, and name them."""
        chance = self.chance
        for _ in range(chance.randint(2, 4)):
            self.start()
        self.operator.until_ready(*self.known)
        self.name(self.known)
        self.delay_s = chance.choice([0.0, 0.05, 0.5])
        kinds = ["go", "join", "revise", "freeze"]
        self.events = sorted((chance.randint(1, STEPS - 2), chance.choice(kinds)) for _ in range(chance.randint(1, 4)))

    def start(self) -> Worker:
        """Start one more worker."""
        trap = None
        if self.chance.random() < 0.4:
            place = self.chance.choice(PLACES)
            trap = {"place": place, "step": self.chance.randint(0, 2 if place in ("building", "built") else STEPS - 1)}
            if place in ("reducing", "reduced", "built"):
                trap["do"] = self.chance.choice(["die", "lose"])
        worker = self.operator.start(f"w{self.count}", trap=trap, slow_s=0.005)
        self.count += 1
        self.known.append(worker)
        return worker

    def name(self, workers: list[Worker]) -> None:
        """Begin a generation with these workers in random order and with random shares."""
        order = self.chance.sample(workers, len(workers))
        self.operator.plan(order, shares=self.shares(len(order)), boundary=self.boundary())
        self.named = tuple(sorted(worker.uid for worker in workers))
        self.changed_s = None

    def shares(self, count: int) -> tuple[int, ...]:
        """Return random shares of 16, zero among them."""
        cuts = sorted(self.chance.randint(0, 16) for _ in range(count - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, 16], strict=True))

    def boundary(self) -> Boundary:
        """Return a random boundary."""
        return self.chance.choice([Boundary(), Boundary(kind=BoundaryKind.STEPS, every_steps=2)])

    def alive(self) -> list[Worker]:
        """Return the workers that could take part in a new generation."""
        return [w for w in self.known if w.poll() is None and w.uid not in self.told_to_go and w.ready()]

    def step(self) -> int:
        """Return the furthest committed step."""
        return max((int(w.metric("heterotrain_step") or 0) for w in self.known if w.poll() is None), default=0)

    def play(self) -> None:
        """Let everything happen, and react as an operator does, until somebody has finished and all have ended."""
        end_s = time.monotonic() + LIMIT_S
        while not self.over():
            assert time.monotonic() < end_s, self.operator.evidence()
            step = self.step()
            while self.events and self.events[0][0] <= step:
                self.happen(self.events.pop(0)[1])
            self.react()
            time.sleep(0.01)

    def happen(self, kind: str) -> None:
        """Do one event to a random worker that is alive."""
        alive = self.alive()
        if kind == "join":
            self.start()
        elif not alive:
            return
        elif kind == "go":
            worker = self.chance.choice(alive)
            self.told_to_go.add(worker.uid)
            worker.signal(signal.SIGTERM)
        elif kind == "freeze":
            worker = self.chance.choice(alive)
            worker.signal(signal.SIGSTOP)
            time.sleep(self.chance.choice([0.05, 0.5]))
            worker.signal(signal.SIGCONT)
        elif self.named:
            members = [w for uid in self.named for w in self.known if w.uid == uid]
            order = [next(w for w in members if w.uid == m) for m in self.ranks()]
            self.operator.plan(
                order, to=[w for w in order if w.poll() is None], new_generation=False, shares=self.shares(len(order)),
                boundary=self.boundary(),
            )  # fmt: skip

    def ranks(self) -> list[str]:
        """Return the uids by rank of the plan in force."""
        return [member.worker_uid for member in self.operator.newest.members]

    def react(self) -> None:
        """Name whoever is alive when that differs from the plan, after the operator's delay."""
        alive = self.alive()
        if not alive:
            if not any(worker.poll() is None for worker in self.known):
                self.start()
            return
        if tuple(sorted(worker.uid for worker in alive)) == self.named:
            self.changed_s = None
            return
        now_s = time.monotonic()
        self.changed_s = self.changed_s or now_s
        if now_s - self.changed_s >= self.delay_s:
            self.name(alive)

    def over(self) -> bool:
        """Return whether somebody has finished and nobody who holds state still runs."""
        ended = [w for w in self.known if w.poll() is not None]
        finished = [w for w in ended if w.outcome is not None and w.outcome.ending is Ending.FINISHED]
        running = [w for w in self.known if w.poll() is None]
        return bool(finished) and not any(w.metric("heterotrain_step") for w in running)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """One history."""
    operator = operate(epochs=EPOCHS, peer_timeout_s=0.5, checkpoint_uri=None)
    story = Story(chance=random.Random(seed), operator=operator)  # noqa: S311 - a seeded story, no secret
    story.begin()
    story.play()
    expected, ids = reference(epochs=EPOCHS)
    for worker in story.known:
        assert worker.code in (None, 0, -signal.SIGKILL), worker.log()
        if worker.outcome is not None:
            assert worker.outcome.ending is not Ending.FAILED, worker.log()
            if worker.outcome.ending is Ending.FINISHED:
                assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids
