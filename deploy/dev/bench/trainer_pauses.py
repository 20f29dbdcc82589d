"""Pauses of training when one of three workers leaves or joins, compared with torchrun and torchft. Prints Markdown.

All workers are processes on this machine. A pause is the longest gap between two commits of a remaining worker around
the event, so it includes an ordinary step. Joining workers are started earlier, so that loading torch does not count.
This trainer's workers get their plans from a stand-in for the operator, and handle losses among themselves.

torchft is measured if its interpreter is given: `python -m venv F && F/bin/pip install torchft-nightly`, then
`--torchft F/bin/python`.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from machine import machine
from setups import Heterotrain, Setup, Torchft, Torchrun, commits, until

STEADY = 20
"""Commits before an event, so that the last event is over."""
AFTER = 15
"""Commits after an event, to search for the gap."""


def gap_s(folder: Path, name: str, at_s: float) -> float:
    """Return the longest gap between commits around a time."""
    until(lambda: sum(moment > at_s for moment in commits(folder, name)) >= AFTER, f"{name} goes on")
    times = commits(folder, name)
    first = next(i for i, moment in enumerate(times) if moment > at_s)
    return max(later - sooner for sooner, later in pairwise(times[max(0, first - 1) : first + AFTER]))


def steady(folder: Path, name: str) -> float:
    """Wait for some undisturbed steps; return the usual gap between commits in seconds."""
    begun = len(commits(folder, name))
    until(lambda: len(commits(folder, name)) >= begun + STEADY, f"{name} trains")
    return statistics.median(b - a for a, b in pairwise(commits(folder, name)[-STEADY:]))


def measure(
    make: Callable[[Path], Setup], ways: dict[str, signal.Signals], *, repeats: int, observer: str
) -> tuple[dict[str, list[float]], float]:
    """Return the pauses by event, and the usual gap."""
    found: dict[str, list[float]] = {way: [] for way in (*ways, "a worker joins")}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        setup = make(folder)
        try:
            usual = [steady(folder, observer)]
            for turn in range(repeats):
                for way, number in ways.items():
                    survivor, at_s = setup.lose(turn, number)
                    found[way].append(gap_s(folder, survivor, at_s))
                    setup.replace()
                    steady(folder, survivor)
                    at_s = setup.admit()
                    found["a worker joins"].append(gap_s(folder, survivor, at_s))
                    usual.append(steady(folder, survivor))
        finally:
            setup.close()
    return found, statistics.median(usual)


def row(who: str, what: str, pauses_s: list[float], usual_s: float) -> str:
    """Return one line of the table."""
    ordered = sorted(pauses_s)
    p95_s = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    figures = (statistics.median(ordered), p95_s, ordered[-1])
    return f"| {who} | {what} | {len(ordered)} | {' | '.join(f'{s:.3f} s' for s in figures)} | {usual_s * 1e3:.0f} ms |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="events of each kind for this trainer")
    parser.add_argument("--others", type=int, default=6, help="events for torchrun and torchft")
    systems = ("heterotrain", "torchrun", "torchft")
    parser.add_argument("--who", nargs="+", choices=systems, default=systems, help="systems to measure (all)")
    parser.add_argument("--torchft", metavar="PYTHON", help="an interpreter with torchft")
    arguments = parser.parse_args()
    print(machine())
    print("\n| system | event | n | median | p95 | longest | an ordinary step |\n|" + " --- |" * 7, flush=True)
    kill = {"SIGKILL": signal.SIGKILL}
    if "heterotrain" in arguments.who:
        found, usual_s = measure(
            Heterotrain, {"SIGTERM": signal.SIGTERM} | kill, repeats=arguments.repeats, observer="w0"
        )
        for what, pauses_s in found.items():
            print(row("this trainer", what, pauses_s, usual_s), flush=True)
    if "torchrun" in arguments.who:
        found, usual_s = measure(Torchrun, kill, repeats=arguments.others + 1, observer="rank-0")
        restarts_s = found["SIGKILL"][1:]  # the first one compiles what its interpreters load
        print(row("torchrun, all restart", "SIGKILL", restarts_s, usual_s), flush=True)
    if "torchft" in arguments.who and arguments.torchft is None:
        print("\ntorchft was not measured: give an interpreter with torchft by --torchft.")
    elif "torchft" in arguments.who:
        python = str(arguments.torchft)
        found, usual_s = measure(lambda f: Torchft(f, python), kill, repeats=arguments.others, observer="w0")
        print(row("torchft", "SIGKILL", found["SIGKILL"], usual_s), flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
