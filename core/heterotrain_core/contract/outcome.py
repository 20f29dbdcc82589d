"""The outcome that a worker writes as its termination message.

Exit code 0 alone is ambiguous: an evicted worker also exits with 0. A job succeeds only by ``finished``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

MAX_MESSAGE_BYTES = 4096
"""The kubelet keeps this many bytes of a termination message."""
MAX_METRICS = 16
"""Metrics in an outcome, so that the message fits."""
MAX_METRIC_NAME = 64
"""Characters of a metric's name; metrics with longer names are left out."""
MAX_COUNT = 2**53 - 1
"""Larger epochs and steps are not counts, and not every reader of JSON can represent them."""
LATEST_S = 253_402_300_799.0
"""Seconds since 1970 at the end of the year 9999; later times are no times."""


class Ending(StrEnum):
    """How a worker ended."""

    FINISHED = "finished"
    """Every epoch is committed."""
    LEFT = "left"
    """It stopped on request (SIGTERM, drain), and its peers were informed."""
    FAILED = "failed"
    """It failed by itself: an exception in the script, or a bad configuration."""


class Cause(StrEnum):
    """What ended a worker, where the operator treats that in a way of its own."""

    PLAIN_SCRIPT = "PlainScript"
    """The script ended with exit code 0 and never used heterotrain."""
    TORCHRUN_SCRIPT = "TorchrunScript"
    """A script for torchrun ended with exit code 0 here; its processes on other workers may still run."""
    NOT_FINITE = "NotFinite"
    """The loss, the gradient or the weights were infinite or NaN."""
    COPIES_DIFFERED = "CopiesDiffered"
    """The ranks' copies of the training state differed."""
    OUT_OF_DEVICE_MEMORY = "OutOfDeviceMemory"
    STATE_LOST = "StateLost"
    """Other workers took parts of the training state with them, and there was no checkpoint."""
    VERSION_MISMATCH = "VersionMismatch"
    """The image cannot read what this operator writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a worker ended, why in one sentence, its training progress, and the last reported metrics.

    Attributes:
        epoch: epochs that were begun, from 0.
        step: committed steps.
        metrics: newest values reported by the script, at most ``MAX_METRICS``; part of the outcome because a process
            that ends is not scraped again.
        told: whether the pod got SIGTERM, rather than leaving by the plan; ``False`` from a worker that does not report
            it.
        cause: what ended it; ``None`` for anything that has no name here, or a name of a newer version.
        checkpoint_step: committed steps of the newest complete checkpoint that it wrote or continued from; ``None``
            for none. The last one is often written after SIGTERM, and a process that ends is not scraped again.
        checkpoint_time_s: when that became complete, in seconds since 1970; ``None`` exactly if there is no step.
    """

    ending: Ending
    reason: str
    epoch: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    told: bool = False
    cause: Cause | None = None
    checkpoint_step: int | None = None
    checkpoint_time_s: float | None = None


def encode_outcome(outcome: Outcome) -> str:
    """Return the outcome as JSON that fits a termination message: a long reason is cut, then metrics are left out."""
    reason = outcome.reason
    few = _within_limits(outcome.metrics)
    while True:
        text = json.dumps({**asdict(outcome), "reason": reason, "metrics": few}, sort_keys=True)
        excess = len(text.encode()) - MAX_MESSAGE_BYTES
        if excess <= 0:
            return text
        if not reason:
            few.popitem()  # their names may take six bytes a character
            continue
        reason = reason[: max(0, len(reason) - excess - 1)] + "…" if len(reason) > excess + 1 else ""


def decode_outcome(text: str) -> Outcome | None:
    """Return the outcome, or ``None`` when the text is not an outcome (a foreign or truncated message).

    Metrics beyond the limits of ``encode_outcome`` are left out, and so is a checkpoint without a possible step and
    time. Counts beyond ``MAX_COUNT`` are no outcome's.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        return None
    try:
        raw = json.loads(text)
        metrics = {str(name): float(value) for name, value in raw.get("metrics", {}).items()}
        saved_step, saved_s = _checkpoint(raw.get("checkpoint_step"), raw.get("checkpoint_time_s"))
        found = Outcome(
            ending=Ending(raw["ending"]),
            reason=str(raw["reason"]),
            epoch=int(raw["epoch"]),
            step=int(raw["step"]),
            metrics=_within_limits(metrics),
            told=raw.get("told") is True,
            cause=next((cause for cause in Cause if cause == raw.get("cause")), None),
            checkpoint_step=saved_step,
            checkpoint_time_s=saved_s,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # the last two: a number such as 1e999, and thousands of nested lists
    return found if 0 <= found.epoch <= MAX_COUNT and 0 <= found.step <= MAX_COUNT else None


def _checkpoint(step: object, time_s: object) -> tuple[int, float] | tuple[None, None]:
    """Return a checkpoint's step and time, or twice ``None`` where one of them is missing or impossible."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_COUNT:
        return None, None
    if not isinstance(time_s, int | float) or isinstance(time_s, bool) or not 0 < time_s <= LATEST_S:
        return None, None
    return step, float(time_s)


def _within_limits(metrics: Mapping[str, float]) -> dict[str, float]:
    sound = [(n, value) for n, value in sorted(metrics.items()) if len(n) <= MAX_METRIC_NAME and math.isfinite(value)]
    return dict(sound[:MAX_METRICS])
