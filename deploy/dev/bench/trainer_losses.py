"""Pauses of training when several workers are lost, when hosts go silent, or when one of two is lost. Prints Markdown.

All workers are processes on this machine, as in ``trainer_pauses.py``, and a pause is the longest gap between two
commits of a remaining worker. Time-outs are those of a job that sets none. A silent host is a network namespace whose
cable is unplugged (as root only): no end of a connection is told. Survivors that are a majority continue on their own.
The one survivor of two waits for a plan. A stand-in for the operator writes it as soon as the lost process has ended,
so the operator's own reaction is not part of the figure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
from pathlib import Path

import namespaces
from machine import machine
from setups import Heterotrain
from trainer_pauses import gap_s, row, steady

APART_S = (0.01, 0.03, 0.05, 0.07)
"""Seconds between two losses, of which the second falls into the formation that follows the first, or just after."""


def several(what: str, *, workers: int, count: int, apart_s: tuple[float, ...], repeats: int, unplug: bool) -> None:
    """Lose some workers in each turn, replace them, and print one line of the table."""
    pauses_s, usual_s = [], []
    for_bridge = namespaces.Bridge() if unplug else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as place, for_bridge as bridge:
        folder = Path(place)
        setup = Heterotrain(folder, workers=workers, bridge=bridge)
        try:
            usual_s.append(steady(folder, setup.members[0].name))
            for turn in range(repeats):
                survivor, times_s = setup.lose_several(turn, count, apart_s=apart_s[turn % len(apart_s)])
                pauses_s.append(max(gap_s(folder, survivor, at_s) for at_s in times_s))
                setup.end_lost()
                for _ in range(count):
                    setup.replace()
                    setup.admit()
                usual_s.append(steady(folder, survivor))
        finally:
            setup.close()
    print(row(f"{workers}", what, pauses_s, statistics.median(usual_s)), flush=True)


def one_of_two(*, repeats: int) -> None:
    """Kill one of two workers in each turn, and name the other one in a new plan."""
    pauses_s, usual_s = [], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        setup = Heterotrain(folder, workers=2)
        try:
            usual_s.append(steady(folder, setup.members[0].name))
            for turn in range(repeats):
                survivor, at_s = setup.lose(turn % 2, signal.SIGKILL)
                setup.admit()
                pauses_s.append(gap_s(folder, survivor, at_s))
                setup.replace()
                setup.admit()
                usual_s.append(steady(folder, survivor))
        finally:
            setup.close()
    print(row("2", "one killed, the other gets a plan", pauses_s, statistics.median(usual_s)), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12, help="events of each kind")
    parser.add_argument("--silent", type=int, default=6, help="events with silent hosts, which take seconds each")
    arguments = parser.parse_args()
    print(machine())
    print("\n| workers | event | n | median | p95 | longest | an ordinary step |\n|" + " --- |" * 7, flush=True)
    repeats, silent = arguments.repeats, arguments.silent
    if repeats:
        one_of_two(repeats=repeats)
        several("two killed at once", workers=5, count=2, apart_s=(0.0,), repeats=repeats, unplug=False)
        several("two killed, 10 to 70 ms apart", workers=5, count=2, apart_s=APART_S, repeats=repeats, unplug=False)
    if silent and os.geteuid() == 0:
        several("one host silent", workers=3, count=1, apart_s=(0.0,), repeats=silent, unplug=True)
        several("two hosts silent at once", workers=5, count=2, apart_s=(0.0,), repeats=silent, unplug=True)
        several("two hosts silent, 2 s apart", workers=5, count=2, apart_s=(2.0,), repeats=silent, unplug=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
