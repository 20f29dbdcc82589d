"""Pauses of training when a stage of a pipeline is lost or leaves. Prints Markdown.

All workers are processes on this machine. The model has twelve equal layers with Adam, and every parameter has a living
holder after each event; no job here has a checkpoint. A pause is the longest gap between two commits of a remaining
worker around the event, so it includes an ordinary step. Where no formation may go on, a stand-in for the operator
writes the next plan as soon as the lost processes have ended: its own reaction is not part of the figure.

With root, the second part gives every worker a network namespace, whose cable is limited by a token bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import namespaces
from machine import machine
from setups import Process, commits, until
from stage_setups import Cut, Stages

SMALL, LARGE = 256, 1024
"""Width of the twelve layers: 3 MB and 50 MB of parameters."""
TWO, THREE = (6,), (4, 8)
"""Even cuts of twelve layers into two and three stages."""
STEADY, AFTER = 8, 5
"""Commits before an event, and those after it in which the longest gap is looked for."""


def longest_gap_s(times_s: Sequence[float], at_s: float, after: int) -> tuple[float, float]:
    """Return the longest gap between commits around a time, and the seconds from that time to the end of the gap.

    Args:
        times_s: of all commits of a worker, in order; more than ``after`` of them after ``at_s``.
        at_s: the time of the event.
        after: commits after the event that are looked at.
    """
    first = next(i for i, moment in enumerate(times_s) if moment > at_s)
    around = times_s[max(0, first - 1) : first + after]
    sooner, later = max(pairwise(around), key=lambda pair: pair[1] - pair[0])
    return later - sooner, later - at_s


def figures(values_s: Sequence[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values_s):.2f} s ({min(values_s):.2f} to {max(values_s):.2f})"


class Turns:
    """Repeats of one event, with what was measured."""

    def __init__(self, setup: Stages, *, least: int = 1) -> None:
        """Start five workers in two members."""
        self.setup, self.least = setup, least
        self.gaps_s: list[float] = []
        self.resumed_s: list[float] = []
        self.usual_s: list[float] = []
        self.joins_s: list[float] = []
        self.a: list[Process] = []
        self.b: list[Process] = []

    def whole(self, *, a: int = 2, b: int = 3) -> None:
        """Fill both members with new workers up to so many stages, and train some steps."""
        old = (*self.a, *self.b)
        while len(self.a) < a:
            self.a.append(self.setup.start())
        while len(self.b) < b:
            self.b.append(self.setup.start())
        cuts = {1: (), 2: TWO, 3: THREE}
        members = [Cut(tuple(each), cuts[len(each)]) for each in (self.a, self.b) if each]
        at_s = self.setup.plan(members, least=self.least)
        watched = next((worker for worker in old if worker in (*self.a, *self.b)), None)
        steady = watched or self.b[0]
        until(lambda: sum(t > at_s for t in commits(self.setup.folder, steady.name)) > AFTER + 2, "training goes on")
        if watched is not None:
            times_s = commits(self.setup.folder, watched.name)
            self.joins_s.append(longest_gap_s(times_s, at_s, AFTER)[0])
        self.setup.trains(steady, STEADY)
        self.usual_s.append(
            statistics.median(b - a for a, b in pairwise(commits(self.setup.folder, steady.name)[-STEADY:]))
        )

    def measured(self, worker: Process, at_s: float) -> None:
        """Wait until a worker has committed enough steps after an event, and note its pause."""
        folder = self.setup.folder
        until(lambda: sum(moment > at_s for moment in commits(folder, worker.name)) > AFTER, f"{worker.name} goes on")
        gap_s, resumed_s = longest_gap_s(commits(folder, worker.name), at_s, AFTER)
        self.gaps_s.append(gap_s)
        self.resumed_s.append(resumed_s)

    def row(self, what: str, *, from_event: bool = False) -> str:
        """Return one line of the table."""
        shown = self.resumed_s if from_event else self.gaps_s
        usual_s = statistics.median(self.usual_s)
        return f"| {what} | {len(shown)} | {figures(shown)} | {usual_s:.2f} s | {os.getloadavg()[0]:.0f} |"


def one_of_five(turns: Turns, turn: int) -> None:
    """Kill a rank of either member; the other member goes on by the survivors' vote."""
    turns.whole()
    members = (turns.a, turns.b)
    hit, other = members[turn % 2], members[1 - turn % 2]
    at_s = turns.setup.kill(hit.pop(turn // 2 % len(hit)))
    turns.measured(other[0], at_s)


def replaced(turns: Turns, turn: int) -> None:
    """Kill a rank of a job that needs two members; a waiting worker gets its part from the other member."""
    turns.whole(b=2)
    spare = turns.setup.start()
    place = turn % 2
    at_s = turns.setup.kill(turns.a[place])
    turns.a[place] = spare
    turns.setup.plan([Cut(tuple(turns.a), TWO), Cut(tuple(turns.b), TWO)], least=2)
    turns.measured(turns.b[0], at_s)


def cut_again(turns: Turns, _turn: int) -> None:
    """Kill a stage of a job that needs two members; its member is cut again for the two that are left."""
    turns.whole()
    at_s = turns.setup.kill(turns.b.pop())
    turns.setup.plan([Cut(tuple(turns.a), TWO), Cut(tuple(turns.b), TWO)], least=2)
    turns.measured(turns.a[0], at_s)


def no_member_left(turns: Turns, _turn: int) -> None:
    """Kill a stage of each member; the three that are left become one member, in an order in which all parts move."""
    turns.whole()
    at_s = turns.setup.kill(turns.a.pop(0), turns.b.pop())
    order = (turns.a[0], *turns.b)
    turns.setup.plan([Cut(order, THREE)])
    turns.measured(turns.b[0], at_s)


def announced(turns: Turns, _turn: int) -> None:
    """Ask a stage of the only member to leave; the old layout trains on until a plan cuts it again for the others."""
    turns.whole(a=0)
    leaver = turns.b.pop()
    leaver.send(signal.SIGTERM)
    turns.setup.trains(turns.b[0], 3)
    at_s = turns.setup.plan([Cut(tuple(turns.b), TWO)])
    turns.setup.left(leaver)
    turns.measured(turns.b[0], at_s)


@contextlib.contextmanager
def started(width: int, rate: str, *, least: int = 1) -> Iterator[Turns]:
    """Yield turns with no worker yet; end all workers, and remove their networks."""
    bridge = namespaces.Bridge(rate=rate) if rate else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as place, bridge as joined:
        setup = Stages(Path(place), width, joined)
        try:
            yield Turns(setup, least=least)
        except BaseException:
            for worker in setup.workers:
                print(f"--- {worker.name}\n{(Path(place) / f'{worker.name}.output').read_text()[-4000:]}")
            raise
        finally:
            setup.close()


def measure(
    what: str, event: Callable[[Turns, int], None], repeats: int, *, width: int, rate: str = "", least: int = 1,
    from_event: bool = False, keep: Path | None = None,
) -> None:  # fmt: skip
    """Repeat an event, and print one line of the table, and another one for workers that join."""
    with started(width, rate, least=least) as turns:
        for turn in range(repeats):
            event(turns, turn)
        print(turns.row(what, from_event=from_event), flush=True)
        if keep is not None:
            for worker in turns.setup.workers:
                text = (turns.setup.folder / f"{worker.name}.output").read_text()
                (keep / f"{event.__name__}-{worker.name}.log").write_text(text)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="events of each kind with the small model")
    parser.add_argument("--large", type=int, default=8, help="events of each kind with the large model, as root only")
    parser.add_argument("--rate", default="1gbit", help="of each worker's cable, as tc takes it")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where logs of the workers are kept")
    arguments = parser.parse_args()
    keep = arguments.logs
    print(machine())
    head = "\n| event | n | {} | an ordinary step | load |\n|" + " --- |" * 5
    if arguments.repeats:
        print("\n3 MB of parameters, loopback interface:")
        print(head.format("longest gap between commits"), flush=True)
        small, n = SMALL, arguments.repeats
        measure("SIGKILL of a rank in one of two members, the other goes on", one_of_five, n, width=small, keep=keep)
        measure("SIGTERM of a stage of the only member, cut again", announced, n, width=small, keep=keep)
    if arguments.large and os.geteuid() == 0:
        n, options = arguments.large, {"width": LARGE, "rate": arguments.rate, "keep": keep}
        print(f"\n50 MB of parameters, 200 MB of state, cables of {arguments.rate}:")
        print(head.format("from the event to the next commit"), flush=True)
        lost = {**options, "from_event": True}
        measure("SIGKILL, job of two members, a spare takes the place", replaced, n, **lost, least=2)
        measure("SIGKILL, job of two members, its member cut again", cut_again, n, **lost, least=2)
        measure("SIGKILL in each member, the rest cut into one", no_member_left, n, **lost)
        measure("SIGTERM, only member cut again: gap at the switch", announced, n, **options)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
