"""One seeded history of a job: what happens to whom at which point of the protocol, and an operator that reacts late."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.fault_injectors import FORMING_PLACES, LAST_PLACE, STEP_PLACES
from distributed.harness import LIMIT_S, Operator, Worker
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import Boundary, BoundaryKind

STEPS = 18
PLACES = (*STEP_PLACES, *FORMING_PLACES, LAST_PLACE)
FAULTS = {
    "told to go": "go",
    "told to go, killed before it went": "go",
    "drained by the plan": "wait",
    "killed": "die",
    "killed, with the store": "die",
    "two killed at once": "die",
    "hangs for a moment": "stop",
    "hangs, given up, wakes": "stop",
    "network cut, comes back": "cut",
    "network cut, then power off": "cut",
    "a message lost": "lose",
    "another one joins": "wait",
    "all told to go, others come": "wait",
    "all killed, others come": "wait",
    "reaches one peer no more": "part",
}
"""What happens, and what the victim's fault does for it (see ``fault_injectors.FaultInjector``)."""
AWAY = ("stop", "cut", "part")
"""What lasts until the scenario ends it."""
AWAY_S = 3.0
"""Longest absence of somebody who hangs or is cut off; less as soon as the others have gone on without it."""
MOMENT_S = 0.2


def possible(what: str, place: str) -> bool:
    """Return whether this can happen at this place: a vote runs in the thread that answers peers."""
    return what != "a message lost" or place not in ("step", "backward", "applied", "voting")


@dataclass(slots=True)
class ScheduledFault:
    """Something that happens to one worker when it comes to a place."""

    what: str
    place: str
    at: int
    folder: Path
    victims: list[Worker] = field(default_factory=list)
    since_s: float | None = None
    step: int = 0
    over: bool = False

    @property
    def reached(self) -> Path:
        """The file that appears when it happens."""
        return self.folder / "reached"

    def fault(self) -> dict[str, Any]:
        """Return the victim's fault."""
        do = FAULTS[self.what]
        if self.place == "voting" and do == "wait":
            do = "tell"
        release = str(self.folder / "release")
        found = {"place": self.place, "step": self.at, "do": do, "reached": str(self.reached)}
        return found | ({"release": release} if do in ("wait", "cut", "part") else {})

    def release(self) -> None:
        """Let the victim go on, or mend its cable."""
        (self.folder / "release").touch()


@dataclass(slots=True)
class FaultScenario:
    """One history; ``cells`` are (what, place) that happen in it, each to another worker, if the job gets there."""

    chance: random.Random
    operator: Operator
    cells: list[tuple[str, str]]
    scheduled: list[ScheduledFault] = field(default_factory=list)
    delay_s: float = 0.0
    notices: bool = True
    events: list[tuple[int, str]] = field(default_factory=list)
    known: list[Worker] = field(default_factory=list)
    told_to_go: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    first: str = ""
    named: tuple[str, ...] = ()
    changed_s: float | None = None

    def begin(self) -> None:
        """Start the first workers, some of them with a fate, and name them."""
        chance = self.chance
        self.delay_s = chance.choice([0.0, 0.05, 0.5, 1.5])
        self.notices = chance.random() < 0.5
        self.events = [(chance.randint(1, STEPS - 2), chance.choice(["go", "join", "revise"])) for _ in range(2)]
        for number, (what, place) in enumerate(self.cells):
            self._prepare(number, what, place)
        while len(self.known) < chance.randint(2, 4):
            self.start(self._random_fault())
        self.operator.until_ready(*self.known)
        # The first rank of a job's first plan never takes state: who is to be lost in that has to come later.
        late = [s.victims[0] for s in self.scheduled if (s.what, s.place) == ("killed, with the store", "receiving")]
        self.name([worker for worker in self.known if worker not in late])
        self.events.sort()

    def _prepare(self, number: int, what: str, place: str) -> None:
        """Start those to whom it will happen, and see to it that the job comes to that place."""
        folder = self.operator.folder / f"event-{number}"
        folder.mkdir()
        at = self.chance.randint(1, STEPS - 3) if place in STEP_PLACES else 0
        if place in ("building", "built"):
            at = self.chance.randint(0, 1)
        if at == 1 or place in ("voting", "giving", "receiving"):
            self.events.append((self.chance.randint(1, 6), "join" if place in ("giving", "receiving") else "go"))
        event = ScheduledFault(what, place, at, folder)
        self.scheduled.append(event)
        for _ in range(2 if what == "two killed at once" else 1):
            event.victims.append(self.start(event.fault()))
        if what == "killed, with the store":
            self.first = event.victims[0].uid

    def _random_fault(self) -> dict[str, Any] | None:
        """Return a death for some of those to whom nothing else happens."""
        place = self.chance.choice(STEP_PLACES)
        fault = {"place": place, "step": self.chance.randint(0, STEPS - 1)}
        return fault if self.chance.random() < 0.2 else None

    def start(self, fault: dict[str, Any] | None = None) -> Worker:
        """Start one more worker."""
        worker = self.operator.start(f"w{len(self.known)}", fault=fault, slow_s=0.005)
        self.known.append(worker)
        return worker

    def name(self, workers: list[Worker]) -> None:
        """Begin a generation with these workers in random order and with random shares."""
        order = self.chance.sample(workers, len(workers))
        order.sort(key=lambda worker: worker.uid != self.first)
        reach = [worker for worker in order if worker.uid not in self.cut_off]
        self.operator.plan(order, to=reach, shares=self._shares(len(order)), boundary=self._boundary())
        self.named = tuple(sorted(worker.uid for worker in workers))
        self.changed_s = None

    def revise(self, **fields: Any) -> None:
        """Write a revision of the generation in force, with other shares."""
        by_uid = {worker.uid: worker for worker in self.known}
        order = [by_uid[member.worker_uid] for member in self.operator.newest.members]
        reach = [worker for worker in order if worker.poll() is None and worker.uid not in self.cut_off]
        self.operator.plan(
            order, to=reach, new_generation=False, shares=self._shares(len(order)), boundary=self._boundary(), **fields
        )

    def _shares(self, count: int) -> tuple[int, ...]:
        cuts = sorted(self.chance.randint(0, 16) for _ in range(count - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, 16], strict=True))

    def _boundary(self) -> Boundary:
        return self.chance.choice([Boundary(), Boundary(kind=BoundaryKind.STEPS, every_steps=2)])

    def running(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.known if worker.poll() is None]

    def alive(self) -> list[Worker]:
        """Return those that the operator takes for able to take part in a new generation."""
        away = self.stopped | self.cut_off
        return [
            worker for worker in self.running()
            if worker.uid not in self.told_to_go
            and (not self.notices if worker.uid in away else worker.ready())
        ]  # fmt: skip

    def step(self) -> int:
        """Return the furthest committed step of those that answer."""
        answer = [worker for worker in self.running() if worker.uid not in self.stopped]
        return max((int(worker.metric("heterotrain_step") or 0) for worker in answer), default=0)

    def play(self) -> None:
        """Let everything happen, and react as an operator does, until somebody has finished and all have ended."""
        end_s = time.monotonic() + LIMIT_S
        while not self.is_over():
            assert time.monotonic() < end_s, self.operator.evidence()
            step = self.step()
            while self.events and self.events[0][0] <= step:
                self._happen(self.events.pop(0)[1])
            for event in self.scheduled:
                self._follow(event, step)
            self._react()
            time.sleep(0.01)

    def _happen(self, kind: str) -> None:
        alive = [worker for worker in self.alive() if worker.uid not in self.stopped]
        if kind == "join":
            self.start(self._random_fault())
        elif kind == "go" and alive:
            fated = {worker.uid for event in self.scheduled for worker in event.victims}
            self._tell(self.chance.choice([w for w in alive if w.uid not in fated] or alive))
        elif kind == "revise" and self.named:
            self.revise()

    def _tell(self, worker: Worker) -> None:
        self.told_to_go.add(worker.uid)
        worker.signal(signal.SIGTERM)

    def _follow(self, event: ScheduledFault, step: int) -> None:
        """Do what the test has to do when an event's place is reached, and end an absence."""
        if event.over or not event.reached.exists():
            return
        victim, now_s = event.victims[0], time.monotonic()
        if event.since_s is None:
            event.since_s, event.step = now_s, step
            self._begin(event, victim)
        if FAULTS[event.what] not in AWAY:
            event.over = True
            return
        away_s = now_s - event.since_s
        if event.what == "hangs for a moment":
            event.over = away_s > MOMENT_S and _is_stopped(victim)
        else:
            others_went_on = step > event.step + 1 and away_s > MOMENT_S
            there = FAULTS[event.what] == "stop" and not _is_stopped(victim)
            event.over = (others_went_on or away_s > AWAY_S) and not there
        if event.over:
            if event.what == "network cut, then power off":
                victim.signal(signal.SIGKILL)
                self.operator.until(lambda: victim.poll() is not None, "the power is off")
            event.release()
            victim.signal(signal.SIGCONT)
            self.stopped.discard(victim.uid)
            self.cut_off.discard(victim.uid)

    def _begin(self, event: ScheduledFault, victim: Worker) -> None:
        if event.what == "told to go":
            self.told_to_go.add(victim.uid)
        elif event.what == "told to go, killed before it went":
            self.told_to_go.add(victim.uid)
            victim.signal(signal.SIGKILL)
        elif event.what == "drained by the plan":
            self.told_to_go.add(victim.uid)
            if victim.uid in self.named:
                self.revise(drain=(victim.name,))
        elif event.what == "another one joins":
            newcomer = self.start()
            self.operator.until_ready(newcomer)
            self.name([worker for worker in self.alive() if worker.uid not in self.stopped])
        elif event.what == "all told to go, others come":
            for worker in self.running():
                self._tell(worker)
        elif event.what == "all killed, others come":
            for worker in self.running():
                worker.signal(signal.SIGKILL)
        elif FAULTS[event.what] == "stop":
            self.stopped.add(victim.uid)
        elif FAULTS[event.what] == "cut":
            self.cut_off.add(victim.uid)
        if FAULTS[event.what] == "wait":
            event.release()

    def _react(self) -> None:
        """Name whoever is alive when that differs from the plan, after the operator's delay."""
        alive = self.alive()
        if not alive:
            if not self.running():
                self.start()
            return
        if tuple(sorted(worker.uid for worker in alive)) == self.named:
            self.changed_s = None
            return
        now_s = time.monotonic()
        self.changed_s = self.changed_s or now_s
        if now_s - self.changed_s >= self.delay_s:
            self.name(alive)

    def is_over(self) -> bool:
        """Return whether somebody has finished and nobody who holds state still runs."""
        if self.stopped or self.cut_off:
            return False
        ended = [worker.outcome for worker in self.known if worker.poll() is not None]
        finished = any(outcome is not None and outcome.ending is Ending.FINISHED for outcome in ended)
        return finished and not any(worker.metric("heterotrain_step") for worker in self.running())


def _is_stopped(worker: Worker) -> bool:
    try:
        return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True  # it has ended
