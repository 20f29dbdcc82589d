"""One seeded history of a job: faults of workers at given places of the protocol, and an operator that reacts late."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.drawn_histories import Draws, note
from distributed.fault_injectors import FORMING_PLACES, LAST_PLACE, SCRIPT_PLACES, STEP_PLACES
from distributed.harness import LIMIT_S, Gate, Operator, Worker, deliver
from distributed.queued_updates import LATE_PLACES
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import Boundary, BoundaryKind
from support import patience

STEPS, EPOCH_STEPS = 18, 6
PLACES = (*STEP_PLACES, *SCRIPT_PLACES, *FORMING_PLACES, LAST_PLACE)
FAULTS = {
    "asked to leave": "leave",
    "asked to leave, killed before it left": "leave",
    "drained by the plan": "wait",
    "killed": "die",
    "killed, with the store": "die",
    "two killed at once": "die",
    "hangs for a moment": "stop",
    "hangs, is excluded, resumes": "stop",
    "network cut, comes back": "cut",
    "network cut, then power off": "cut",
    "a message lost": "lose",
    "another one joins": "wait",
    "all asked to leave, others join": "wait",
    "all killed, others join": "wait",
    "cannot connect to one peer": "part",
}
"""The kinds of faults, with the action of the victim's fault injector (see ``fault_injectors.FaultInjector``)."""
AWAY = ("stop", "cut", "part")
"""Actions that last until the scenario ends them."""
AWAY_S = 3.0
"""Longest absence of a worker that hangs or is cut off; it ends earlier if the others continue without the worker."""
MOMENT_S = 0.2


def possible(what: str, place: str) -> bool:
    """Return whether this fault is possible at this place: no message can be lost in the thread that answers peers."""
    return what != "a message lost" or place not in ("step", "backward", "applied", "voting")


@dataclass(slots=True)
class ScheduledFault:
    """A fault of one or two workers at a place of the protocol."""

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
        """The file that is created when the fault is triggered."""
        return self.folder / "reached"

    def fault(self) -> dict[str, Any]:
        """Return the specification for the victim's fault injector."""
        do = FAULTS[self.what]
        if self.place == "voting" and do == "wait":
            do = "mark"
        release = str(self.folder / "release")
        record = str(self.folder.parent / "faults")
        found = {"place": self.place, "step": self.at, "do": do, "reached": str(self.reached), "record": record}
        return found | ({"release": release} if do in ("wait", "cut", "part") else {})

    def release(self) -> None:
        """Let the victim continue, or restore its network."""
        (self.folder / "release").touch()


@dataclass(slots=True)
class FaultScenario:
    """One history of a job.

    Attributes:
        draw: the decisions of the seed.
        cells: pairs of (fault, place) in this history, each for another worker; some places may not be reached.
        delay_s: seconds until the operator reacts to a change.
        late: whether steps are confirmed late.
        detects_absence: whether the operator sees that a hanging or isolated worker is not ready.
        events: what the operator does by step; the workers wait at the beginning of the step until it has.
        workers: all workers started so far.
        leaving: uids of workers that were asked to leave.
        rank_0: uid of the worker that must be rank 0, or empty.
        planned: uids of the newest plan's members, sorted.
        changed_s: time of the first difference between live workers and plan, which starts ``delay_s``.
    """

    draw: Draws
    operator: Operator
    cells: list[tuple[str, str]]
    scheduled: list[ScheduledFault] = field(default_factory=list)
    delay_s: float = 0.0
    late: bool = False
    detects_absence: bool = True
    events: list[tuple[int, str]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    rank_0: str = ""
    planned: tuple[str, ...] = ()
    changed_s: float | None = None
    gates: dict[int, Gate] = field(default_factory=dict)

    def begin(self) -> None:
        """Start the first workers, some of them with a fault, and write the first plan."""
        rng = self.draw("operator")
        self.delay_s = rng.choice([0.0, 0.05, 0.5, 1.5])
        self.detects_absence = rng.random() < 0.5
        self.events = [(rng.randint(1, STEPS - 2), rng.choice(["evict", "join", "revise"])) for _ in range(2)]
        count = rng.randint(2, 4)
        for number, (what, place) in enumerate(self.cells):
            self._schedule(number, what, place)
        self.events.sort()
        self.gates = {step: Gate(self.operator.folder, step) for step, _ in self.events}
        for event in self.scheduled:
            self._start_victims(event)
        while len(self.workers) < count:
            self.start(self._random_fault())
        self.operator.until_ready(*self.workers)
        # Rank 0 of a job's first plan never receives state: a victim of that place has to join later.
        late = [s.victims[0] for s in self.scheduled if (s.what, s.place) == ("killed, with the store", "receiving")]
        self.write_plan([worker for worker in self.workers if worker not in late])

    def _schedule(self, number: int, what: str, place: str) -> None:
        """Schedule a fault, and an event that brings the job to its place."""
        folder, rng = self.operator.folder / f"event-{number}", self.draw("cell", number)
        folder.mkdir()
        by_step = (*STEP_PLACES, *LATE_PLACES, "between collectives", "in forward")
        at = rng.randint(1, STEPS - 3) if place in by_step else 0
        if place in LATE_PLACES:
            at = rng.choice([step for step in range(STEPS) if 0 < step % EPOCH_STEPS < EPOCH_STEPS - 1])
        if place in ("building", "built"):
            at = rng.randint(0, 1)
        if at == 1 or place in ("voting", "giving", "receiving"):
            self.events.append((rng.randint(1, 6), "join" if place in ("giving", "receiving") else "evict"))
        self.scheduled.append(ScheduledFault(what, place, at, folder))

    def _start_victims(self, event: ScheduledFault) -> None:
        for _ in range(2 if event.what == "two killed at once" else 1):
            event.victims.append(self.start(event.fault()))
        if event.what == "killed, with the store":
            self.rank_0 = event.victims[0].uid

    def _random_fault(self) -> dict[str, Any] | None:
        """Return a random kill for some of the workers without another fault."""
        rng = self.draw("random fault", len(self.workers))
        fault = {"place": rng.choice(STEP_PLACES), "step": rng.randint(0, STEPS - 1)}
        return fault | {"record": str(self.operator.folder / "faults")} if rng.random() < 0.2 else None

    def start(self, fault: dict[str, Any] | None = None) -> Worker:
        """Start another worker."""
        collectives = any(place in SCRIPT_PLACES for _, place in self.cells)
        fault = (fault or {}) | {"gates": [gate.fault for gate in self.gates.values()]}
        worker = self.operator.start(f"w{len(self.workers)}", fault=fault, collectives=collectives, late=self.late)
        self.workers.append(worker)
        return worker

    def write_plan(self, workers: list[Worker]) -> None:
        """Write a new generation with these workers, in random order and with random shares."""
        rng = self.draw("plan", sorted(worker.uid for worker in workers))
        order = rng.sample(sorted(workers, key=lambda worker: worker.uid), len(workers))
        order.sort(key=lambda worker: worker.uid != self.rank_0)
        reachable = [worker for worker in order if worker.uid not in self.cut_off]
        self.operator.plan(order, to=reachable, shares=shares_of(rng, len(order)), boundary=boundary_of(rng))
        self.planned = tuple(sorted(worker.uid for worker in workers))
        self.changed_s = None

    def revise(self, **fields: Any) -> None:
        """Write a revision of the current generation with other shares."""
        rng = self.draw("revision", len(self.operator.plans))
        by_uid = {worker.uid: worker for worker in self.workers}
        order = [by_uid[rank.worker_uid] for rank in self.operator.newest.ranks]
        reachable = [worker for worker in order if worker.poll() is None and worker.uid not in self.cut_off]
        self.operator.plan(
            order,
            to=reachable,
            new_generation=False,
            shares=shares_of(rng, len(order)),
            boundary=boundary_of(rng),
            **fields,
        )

    def running(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.workers if worker.poll() is None]

    def alive(self) -> list[Worker]:
        """Return the workers that the operator considers able to join a new generation."""
        away = self.stopped | self.cut_off
        return [
            worker for worker in self.running()
            if worker.uid not in self.leaving
            and (not self.detects_absence if worker.uid in away else worker.ready())
        ]  # fmt: skip

    def step(self) -> int:
        """Return the latest committed step of the workers that answer."""
        answering = [worker for worker in self.running() if worker.uid not in self.stopped]
        return max((int(worker.metric("heterotrain_step") or 0) for worker in answering), default=0)

    def play(self) -> None:
        """Play all events, with the reactions of an operator, until a worker has finished and all have ended."""
        end_s = patience.now_s() + LIMIT_S
        while not self.is_over():
            assert patience.now_s() < end_s, self.operator.evidence()
            step = self.step()
            for reached in [step for step, gate in self.gates.items() if gate.reached() and not gate.is_open()]:
                for number, (at, kind) in enumerate(self.events):
                    if at == reached:
                        self._play_event(kind, self.draw("event", number))
                        note(self.operator, step=at, do=kind)
                self.gates[reached].open()
            for event in self.scheduled:
                self._follow(event, step)
            self._react()
            time.sleep(0.01)

    def _play_event(self, kind: str, rng: random.Random) -> None:
        alive = [worker for worker in self.alive() if worker.uid not in self.stopped]
        if kind == "join":
            self.start(self._random_fault())
        elif kind == "evict" and alive:
            faulty = {worker.uid for event in self.scheduled for worker in event.victims}
            self._ask_to_leave(rng.choice([w for w in alive if w.uid not in faulty] or alive))
        elif kind == "revise" and self.planned:
            self.revise()

    def _ask_to_leave(self, worker: Worker) -> None:
        self.leaving.add(worker.uid)
        worker.signal(signal.SIGTERM)

    def _follow(self, event: ScheduledFault, step: int) -> None:
        """Play the scenario's part of a fault once its place is reached, and end an absence."""
        if event.over or not event.reached.exists():
            return
        victim, now_s = event.victims[0], patience.now_s()
        if event.since_s is None:
            event.since_s, event.step = now_s, step
            self._start_fault(event, victim)
        if FAULTS[event.what] not in AWAY:
            event.over = True
            return
        away_s = now_s - event.since_s
        if event.what == "hangs for a moment":
            event.over = away_s > MOMENT_S and victim.is_stopped()
        else:
            others_continued = step > event.step + 1 and away_s > MOMENT_S
            running_on = FAULTS[event.what] == "stop" and not victim.is_stopped()
            event.over = (others_continued or away_s > AWAY_S) and not running_on
        if event.over:
            if event.what == "network cut, then power off":
                victim.signal(signal.SIGKILL)
                self.operator.until(lambda: victim.poll() is not None, "the victim's power is off")
            event.release()
            victim.signal(signal.SIGCONT)
            self.stopped.discard(victim.uid)
            if victim.uid in self.cut_off and self.running() == [victim] and self.planned == (victim.uid,):
                deliver(self.operator.newest, victim)  # nobody else is left to tell it
            self.cut_off.discard(victim.uid)

    def _start_fault(self, event: ScheduledFault, victim: Worker) -> None:
        if event.what == "asked to leave":
            self.leaving.add(victim.uid)
        elif event.what == "asked to leave, killed before it left":
            self.leaving.add(victim.uid)
            victim.signal(signal.SIGKILL)
        elif event.what == "drained by the plan":
            self.leaving.add(victim.uid)
            if victim.uid in self.planned:
                self.revise(drain=(victim.name,))
        elif event.what == "another one joins":
            joiner = self.start()
            self.operator.until_ready(joiner)
            self.write_plan([worker for worker in self.alive() if worker.uid not in self.stopped])
        elif event.what == "all asked to leave, others join":
            for worker in self.running():
                self._ask_to_leave(worker)
        elif event.what == "all killed, others join":
            for worker in self.running():
                worker.signal(signal.SIGKILL)
        elif FAULTS[event.what] == "stop":
            self.stopped.add(victim.uid)
        elif FAULTS[event.what] == "cut":
            self.cut_off.add(victim.uid)
        if FAULTS[event.what] == "wait":
            event.release()

    def _react(self) -> None:
        """Plan with the live workers if they differ from the plan, after the operator's delay."""
        alive = self.alive()
        if not alive:
            if not self.running():
                self.start()
            return
        if tuple(sorted(worker.uid for worker in alive)) == self.planned:
            self.changed_s = None
            return
        now_s = patience.now_s()
        self.changed_s = self.changed_s or now_s
        if now_s - self.changed_s >= self.delay_s:
            self.write_plan(alive)

    def is_over(self) -> bool:
        """Return whether a worker has finished and no worker with state is still running."""
        if self.stopped or self.cut_off:
            return False
        ended = [worker.outcome for worker in self.workers if worker.poll() is not None]
        finished = any(outcome is not None and outcome.ending is Ending.FINISHED for outcome in ended)
        return finished and not any(worker.metric("heterotrain_step") for worker in self.running())


def shares_of(rng: random.Random, count: int) -> tuple[int, ...]:
    """Return random shares of so many workers."""
    cuts = sorted(rng.randint(0, 16) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, 16], strict=True))


def boundary_of(rng: random.Random) -> Boundary:
    """Return a random boundary of a plan."""
    return rng.choice([Boundary(), Boundary(kind=BoundaryKind.STEPS, every_steps=2)])
