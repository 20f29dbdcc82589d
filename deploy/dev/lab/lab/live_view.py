"""A live view of a running job: a new line every few seconds, whenever the status has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from lab.cluster import ClusterError
from lab.jobs import Job


def describe(status: Mapping[str, Any], *, elapsed_s: float) -> str:
    """Return one line about a job from its status, with a dash for each unknown value."""

    def number(key: str, pattern: str) -> str:
        value = status.get(key)
        return "-" if value is None else pattern.format(float(value))

    version, found = status.get("plan", {}), status.get("prediction", {})
    measured_s, predicted_s = found.get("measuredStepSeconds"), found.get("predictedStepSeconds")
    steps = f"{measured_s / predicted_s:.0%}" if measured_s and predicted_s else "-"
    shares = " ".join(
        f"{each['pool']}:{each['shareSamples']}" for each in status.get("workers", []) if "shareSamples" in each
    )
    metrics = "".join(f" {name} {value:.3f}" for name, value in status.get("metrics", {}).items())
    return (
        f"{elapsed_s:6.0f} s  {status.get('state', '-'):<10} epoch {status.get('epoch', '-')!s:<3}"
        f" loss {number('loss', '{:.3f}'):<6}{metrics}"
        f" {number('samplesPerSecond', '{:.0f}'):>5} samples/s  eff {number('efficiency', '{:.2f}'):<5}"
        f" steps {steps:>4} of predicted"
        f" plan {version.get('applied', '-'):<6} {shares}"
    )


class Live:
    """Print a job's line every ``every_s`` seconds while the block runs, and events through ``say``."""

    def __init__(self, job: Job, *, every_s: float = 3.0) -> None:
        self._job, self._every_s = job, every_s
        self._started_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def say(self, text: str) -> None:
        """Print an event between the lines."""
        print(f"{time.monotonic() - self._started_s:6.0f} s  >>> {text}", flush=True)

    def _run(self) -> None:
        last = ""
        while not self._done.wait(self._every_s):
            try:
                line = describe(self._job.status(), elapsed_s=time.monotonic() - self._started_s)
            except ClusterError as error:
                line = f"(no status: {error})"
            if line[8:] != last[8:]:
                print(line, flush=True)
            last = line
