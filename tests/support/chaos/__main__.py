"""Play histories and print those that went wrong, each with the fewest faults that still do: see ``make chaos``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import NoReturn

import structlog

from support.chaos.history import Verdict, play


def main() -> int:
    """Play the histories asked for; return 1 if one went wrong."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--histories", type=int, default=200, help="number of histories")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; each further one has the next")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="histories to play at the same time")
    parser.add_argument("--verbose", action="store_true", help="print every history, and the operators' logs")
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a history
        command = [sys.executable, "-m", "support.chaos", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False).returncode
    if not asked.verbose:
        silence()
    began_s, wrong, kinds = time.perf_counter(), [], Counter()
    seeds = range(asked.seed, asked.seed + asked.histories)
    with ProcessPoolExecutor(1 if asked.verbose else asked.processes) as pool:
        for verdict in pool.map(play, seeds):
            kinds.update(fault.kind for fault in verdict.faults)
            if asked.verbose:
                print(verdict)
            if verdict.problems:
                wrong.append(verdict)
                print(shrunk(verdict), flush=True)
    print(
        f"{asked.histories} histories, seeds {seeds.start} to {seeds.stop - 1}, {time.perf_counter() - began_s:.0f} s: "
        f"{len(wrong)} went wrong. Faults: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}"
    )
    for verdict in wrong:
        print(f"repeat one: make chaos HISTORIES=1 SEED={verdict.seed}")
    return 1 if wrong else 0


def shrunk(verdict: Verdict) -> Verdict:
    """Return the history with only those faults without which it would go right."""
    faults = list(verdict.faults)
    for fault in list(faults):
        fewer = [each for each in faults if each is not fault]
        if (shorter := play(verdict.seed, fewer)).problems:
            faults, verdict = fewer, shorter
    return verdict


def silence() -> None:
    """Drop the operators' logs."""

    def drop(*_: object) -> NoReturn:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])


if __name__ == "__main__":
    sys.exit(main())
