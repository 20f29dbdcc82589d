"""Everything that needs a GPU, in order of value, within nine minutes on one card. Ends with one table.

Each part is a program of its own with a limit of its own; a part that fails, hangs or has no time left costs the others
nothing. Its output goes to ``out/gpu/PART.txt`` as it comes. Lines of a part that begin with ``| `` are rows of the
last table: what was measured, the figure, the goal, and whether it is met.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import machine

ROOT = Path(__file__).resolve().parents[3]
BENCH = Path(__file__).parent
ROW = "| "
HEADS = ("measured", "figure", "goal", "met")
LIMIT_S = 540.0
ENDS_S = 5.0
"""A part that is stopped has this long to end what it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One program.

    Attributes:
        name: what the user calls it.
        shows: what it is for, in a few words.
        command: the program and its arguments, after the interpreter.
        limit_s: seconds after which it is stopped.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float


def parts(scale: float) -> tuple[Part, ...]:
    """Return all parts, most valuable first.

    Args:
        scale: factor on the seconds of each measurement; 1 for figures worth quoting.
    """

    def seconds(usual: float) -> str:
        return f"{usual * scale:g}"

    tests = ("-m", "pytest", "-q", "-n", "6", "-p", "no:cacheprovider", "-p", "no:benchmark", "tests/cuda")
    return (
        Part(
            name="gate", shows="an update behind a gate on the device: bits, aborts in mid-sum",
            command=(str(BENCH / "gpu_gate.py"), "--aborts", "3"), limit_s=80,
        ),
        Part(
            name="overhead", shows="cost of a step beyond DistributedDataParallel",
            command=(str(BENCH / "trainer_overhead.py"), "--seconds", seconds(8), "--goals", "--models",
                *"1829340765"), limit_s=260,
        ),
        Part(
            name="mixed", shows="ranks of different speed: learned against even shares",
            command=(str(BENCH / "gpu_mixed.py"), "--seconds", seconds(20)), limit_s=100,
        ),
        Part(name="tests", shows="tests/cuda", command=tests, limit_s=150),
    )  # fmt: skip


def run(part: Part, folder: Path, *, left_s: float) -> tuple[list[str], str]:
    """Run a part; return its rows of the table, and how it ended."""
    path = folder / f"{part.name}.txt"
    places = [str(ROOT / each) for each in ("core", "planner", "operator", "trainer", "cli", "tests")]
    places += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1"}
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    late = threading.Timer(min(part.limit_s, left_s), _stop, [process])
    late.start()
    rows = []
    assert process.stdout is not None  # noqa: S101  # a pipe was asked for
    with path.open("w") as output:
        for line in process.stdout:
            output.write(line)
            output.flush()
            print(f"  {line}", end="", flush=True)
            if line.startswith(ROW):
                rows.append(line.rstrip())
    code = process.wait()
    stopped = not late.is_alive()
    late.cancel()
    _signal(process, signal.SIGKILL)  # what it may have left behind
    took = f"{time.monotonic() - began_s:.0f} s"
    if stopped:
        return rows, f"stopped after {took}: its limit"
    return rows, f"{took}" if code == 0 else f"failed after {took} with exit code {code}"


def _stop(process: subprocess.Popen[str]) -> None:
    _signal(process, signal.SIGTERM)
    time.sleep(ENDS_S)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one of them failed or was stopped, or if a goal was missed."""
    everything = parts(1.0)
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Parts: " + "; ".join(f"{part.name}: {part.shows}" for part in everything)
    )
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in everything], help="which ones (all)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the seconds of each measurement (1)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for all of them ({LIMIT_S:g})")
    options = parser.parse_args(arguments)
    if not 0 < options.scale <= 100 or not options.limit > 0:  # noqa: PLR2004  # an hour for one measurement
        parser.error("--scale has to be above 0 and at most 100, and --limit above 0")
    import torch  # noqa: PLC0415  # --help needs no GPU

    if not torch.cuda.is_available():
        print("make gpu needs a GPU that PyTorch can use; torch.cuda.is_available() is false here", file=sys.stderr)
        return 1
    folder = ROOT / "out" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    end_s, found, ended = time.monotonic() + options.limit, [], []
    for part in parts(options.scale):
        left_s = end_s - time.monotonic()
        if part.name not in (options.parts or [part.name]):
            continue
        print(f"\n==> {part.name}: {part.shows}", flush=True)
        rows, how = ([], "not run: no time was left") if left_s < ENDS_S else run(part, folder, left_s=left_s)
        found += rows
        ended.append((part.name, how))
    table = [f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}", *found]
    text = "\n".join([machine(), "", *table, "", *(f"{name}: {how}" for name, how in ended), ""])
    (folder / "table.md").write_text(text)
    print(f"\n{text}")
    missed = any(row.endswith("| no |") for row in found)
    return 1 if missed or any(not how.removesuffix(" s").isdecimal() for _, how in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
