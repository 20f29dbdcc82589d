"""Ranks of a user's script on this machine, started as torchrun starts them, and their counters."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import BadStatusLine
from itertools import chain
from pathlib import Path
from typing import IO, Final

from heterotrain_core.contract import env, keys
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe

from heterotrain_cli.errors import InputError

WARM_UP_STEPS: Final = 5
"""The first steps of a process load kernels and fill caches."""
LEAST_STEPS: Final = 10
POLL_S: Final = 0.2
_REQUEST_S = 5.0
_END_S = 10.0
"""Time for ranks to end after SIGTERM."""
_MANY_EPOCHS = 1_000_000
"""The script is ended once it is measured."""
_MOST_QUOTED = 300

_MOST_TRIES = 3
"""Each with other ports, because another program may take one between the search for free ones and their use."""

Snapshot = Mapping[CounterKey, Counters]


class _PortTakenError(InputError):
    """Another program answers where a rank should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One configuration of the script.

    Attributes:
        ranks: processes that train together.
        batch_samples: the global batch.
        threads: of PyTorch in each process.
        precision: as in ``init``.
        compression: as in ``init``.
    """

    ranks: int
    batch_samples: int
    threads: int
    precision: str = "auto"
    compression: str = "none"


def measure(
    command: Sequence[str], run: BenchRun, *, seconds: float, timeout_s: float, folder: Path
) -> list[Observation]:
    """Run the script, and return what its ranks counted in ``seconds`` after their first steps.

    The settings of the script's own ``init`` are replaced: the batch is that of the run, there are epochs enough, and
    no checkpoint is read or written.

    Args:
        command: the script and its arguments, after ``python``.
        run: ranks and batch.
        seconds: length of the measurement; it lasts longer where that is fewer than ``LEAST_STEPS`` steps.
        timeout_s: from the start of the processes to the end of the measurement.
        folder: for the output of the ranks.

    Raises:
        InputError: the script ended, or it did not train within the time.
    """
    within = {"seconds": seconds, "deadline_s": time.monotonic() + timeout_s, "timeout_s": timeout_s}
    for _ in range(_MOST_TRIES - 1):
        with contextlib.suppress(_PortTakenError):
            return _measured(command, run, **within, folder=folder)
    return _measured(command, run, **within, folder=folder)


def _measured(
    command: Sequence[str], run: BenchRun, *, seconds: float, deadline_s: float, timeout_s: float, folder: Path
) -> list[Observation]:
    with _started(command, run, folder) as (port, failure):

        def scraped(is_enough: Callable[[Snapshot], bool], what: str) -> Snapshot:
            while True:
                if reason := failure():
                    raise InputError(f"{_named(command, run)} {reason}")
                with contextlib.suppress(urllib.error.URLError, OSError):
                    if is_enough(found := _scrape(port, run.ranks)):
                        return found
                if time.monotonic() > deadline_s:
                    raise InputError(
                        f"{_named(command, run)} {what} within {timeout_s:.0f} s: it has to call heterotrain.init() "
                        "and train with job.steps (docs/other-libraries.md); --timeout gives it more time"
                    )
                time.sleep(POLL_S)

        before = scraped(lambda seen: _fewest_steps(seen, run.ranks) >= WARM_UP_STEPS, "committed too few steps")
        since_s, first = time.monotonic(), _fewest_steps(before, run.ranks)
        after = scraped(
            lambda seen: (
                time.monotonic() - since_s >= seconds and _fewest_steps(seen, run.ranks) - first >= LEAST_STEPS
            ),
            f"committed fewer than {LEAST_STEPS} steps",
        )
    return list(observe(before, after, ended_s=time.monotonic() - since_s))


def samples_per_s(observations: Sequence[Observation]) -> float:
    """Return the throughput of all ranks: the sum over ranks of own samples over seconds of their steps.

    Evaluations between epochs are not part of a step.
    """
    total = 0.0
    for member in {each.member for each in observations}:
        own = [each for each in observations if each.member == member and each.step is not None]
        spent_s = sum(each.steps * each.step.mean for each in own if each.step is not None)
        total += sum(each.steps * each.share_samples for each in own) / spent_s if spent_s > 0 else 0.0
    return total


def step_s(observations: Sequence[Observation]) -> float:
    """Return the mean seconds of a step, over all ranks; 0 without any."""
    timed = [each for each in observations if each.step is not None]
    steps = sum(each.steps for each in timed)
    return sum(each.steps * each.step.mean for each in timed if each.step is not None) / steps if steps else 0.0


@contextmanager
def _started(command: Sequence[str], run: BenchRun, folder: Path) -> Iterator[tuple[int, Callable[[], str]]]:
    """Start the ranks and end them afterwards; yield their first metrics port, and why one of them has ended."""
    port = _free_ports(run.ranks + 1)
    meeting = port + run.ranks
    config = TrainingConfig(
        epochs=_MANY_EPOCHS, base_batch_samples=run.batch_samples, precision=run.precision, compression=run.compression
    )
    with contextlib.ExitStack() as stack:
        children: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        stack.callback(_end, children)
        for rank in range(run.ranks):
            output = stack.enter_context((folder / f"{run.ranks}-ranks-rank-{rank}.log").open("w+b"))
            own = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting, env.METRICS_PORT: port,
                env.CONFIG: encode_config(config), "OMP_NUM_THREADS": run.threads, "PYTHONUNBUFFERED": 1,
            }  # fmt: skip
            environ = {name: value for name, value in os.environ.items() if not name.startswith(env.PREFIX)}
            children.append((
                subprocess.Popen(
                    [sys.executable, *command],
                    env=environ | {name: str(value) for name, value in own.items()},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                ),
                output,
            ))  # fmt: skip

        def failure() -> str:
            for child, output in children:
                code = child.poll()
                if code is not None:
                    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    return f"{how} before it was measured; its last line: {_last_line(output) or 'none'}"
            return ""

        yield port, failure


def _end(children: Sequence[tuple[subprocess.Popen[bytes], IO[bytes]]]) -> None:
    for child, _ in children:
        child.terminate()
    deadline_s = time.monotonic() + _END_S
    for child, _ in children:
        try:
            child.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _scrape(first_port: int, ranks: int) -> Snapshot:
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415  # an extra of the trainer

    rows: list[VectorSample] = []
    for port in range(first_port, first_port + ranks):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{keys.METRICS_PATH}", timeout=_REQUEST_S) as reply:
                text = reply.read().decode()
        except BadStatusLine as error:
            if isinstance(error, OSError):  # the rank ends
                raise
            raise _PortTakenError(
                f"another program took port {port} a moment before a rank could: try again"
            ) from error
        rows += [
            VectorSample({"__name__": sample.name, **sample.labels}, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    return parse_everything(rows).counters


def _fewest_steps(seen: Snapshot, ranks: int) -> float:
    """Return the steps of the rank with the fewest; 0 while a rank has none."""
    steps: dict[str, float] = {}
    for key, counters in seen.items():
        steps[key.member] = steps.get(key.member, 0.0) + counters.steps
    return min(steps.values()) if len(steps) == ranks else 0.0


def _free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row, outside the kernel's range for clients.

    Raises:
        InputError: there are none.
    """
    first = 20_000 + 16 * (os.getpid() % 512)
    last = 32_000
    for start in chain(range(first, last - count, 16), range(20_000, first, 16)):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(start, start + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return start
    raise InputError(f"there are no {count} free ports in a row between 20000 and {last}")


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_MOST_QUOTED] if lines else ""


def _named(command: Sequence[str], run: BenchRun) -> str:
    return f"{command[0]} with {run.ranks} worker{'s' if run.ranks > 1 else ''}"
