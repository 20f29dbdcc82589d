"""Progress for people: a line in the leader's log every ten seconds, or a bar on a terminal."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_log = logging.getLogger(__name__)

LINE_S = 10.0
"""Seconds between two lines of a log."""
BAR_S = 0.5
"""Seconds between two drawings of the bar."""
BAR_COLUMNS = 24
CLEAR = "\r\x1b[K"
"""Back to the beginning of the line, and clear it."""
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the training is, after a committed step.

    Attributes:
        epoch: completed epochs.
        epochs: of the whole job.
        samples: committed samples since the job began.
        epoch_done: committed samples of the current epoch.
        epoch_samples: samples of an epoch; ``None`` while unknown.
        loss: of the newest step; ``None`` when there is none.
        ranks: in the formation.
        share_samples: this rank's share of the global batch.
        batch_samples: the global batch.
        steps: committed ones.
        steps_left: of a training by steps; ``None`` where epochs decide.
        price_per_hour: of all workers of the plan together; ``None`` while no price is known.
    """

    epoch: int
    epochs: int
    samples: int
    epoch_done: int
    epoch_samples: int | None
    loss: float | None
    ranks: int
    share_samples: int
    batch_samples: int
    price_per_hour: float | None = None
    steps: int = 0
    steps_left: int | None = None

    @property
    def fraction(self) -> float | None:
        """The completed part of the training, from 0 to 1; ``None`` while the length of an epoch is unknown."""
        if self.steps_left is not None:
            return self.steps / max(1, self.steps + self.steps_left)
        if not self.epoch_samples:
            return None
        return min(1.0, (self.epoch + self.epoch_done / self.epoch_samples) / self.epochs)

    @property
    def samples_left(self) -> int | None:
        """Samples until the end of the job; ``None`` while the length of an epoch is unknown."""
        if self.steps_left is not None:
            return self.steps_left * self.batch_samples
        if not self.epoch_samples:
            return None
        return max(0, (self.epochs - self.epoch) * self.epoch_samples - self.epoch_done)


def line(position: Position, *, samples_per_s: float | None) -> str:
    """Return the progress in one line; ``samples_per_s`` is ``None`` before it was measured."""
    fraction, left = position.fraction, position.samples_left
    parts = [f"epoch {min(position.epoch + 1, position.epochs)} of {position.epochs}"]
    if position.steps_left is not None:
        parts = [f"step {position.steps} of {position.steps + position.steps_left}"]
    if fraction is not None:
        parts[0] += f" ({100 * fraction:.0f} %)"
    if position.loss is not None:
        parts.append(f"loss {position.loss:.4g}")
    if samples_per_s is not None:
        parts.append(f"{samples_per_s:,.4g} samples/s" if samples_per_s < 1000 else f"{samples_per_s:,.0f} samples/s")  # noqa: PLR2004  # four digits
    if position.ranks > 1:
        parts.append(f"{position.ranks} ranks, share {position.share_samples} of {position.batch_samples}")
    if samples_per_s and left is not None:
        parts.append(f"{_duration(left / samples_per_s)} left")
    if position.price_per_hour is not None:
        parts.append(f"price {_money(position.price_per_hour)} an hour")
        if samples_per_s and left is not None:
            parts.append(f"{_money(position.price_per_hour * left / samples_per_s / _HOUR_S)} until the end")
    return ", ".join(parts)


def bar(position: Position, *, samples_per_s: float | None) -> str:
    """Return the progress as a bar and a line."""
    filled = math.floor((position.fraction or 0.0) * BAR_COLUMNS)
    return f"[{'#' * filled}{'.' * (BAR_COLUMNS - filled)}] {line(position, samples_per_s=samples_per_s)}"


class ProgressDisplay:
    """Shows the progress of the leader's training; every other rank stays silent.

    Where stderr is a terminal, a bar is drawn over and over in its last line. Otherwise the log gets a line every
    ``LINE_S`` seconds, the first one after that time.
    """

    def __init__(self, *, stream: TextIO | None = None) -> None:
        """Show it on ``stream``, by default stderr."""
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown_s = math.nan
        self._shown_samples = 0
        self._is_drawn = False

    def committed(self, position: Callable[[], Position], *, leads: bool, now_s: float) -> None:
        """Show the progress after a committed step, if it is time.

        Args:
            position: returns the position; called only when it is shown.
            leads: whether this rank shows anything.
            now_s: of any clock that only moves forward.
        """
        if math.isnan(self._shown_s):
            self._shown_s, self._shown_samples = now_s, position().samples
            return
        if not leads or now_s - self._shown_s < (BAR_S if self._is_terminal else LINE_S):
            return
        there = position()
        rate = (there.samples - self._shown_samples) / (now_s - self._shown_s)
        samples_per_s = rate if rate > 0 else None  # a restored checkpoint lies behind
        self._shown_s, self._shown_samples = now_s, there.samples
        if not self._is_terminal:
            _log.info(line(there, samples_per_s=samples_per_s))
            return
        self._is_drawn = True
        self._stream.write(f"{CLEAR}{bar(there, samples_per_s=samples_per_s)}")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the bar, so that something else can be written in its line."""
        if self._is_drawn:
            self._is_drawn = False
            self._stream.write(CLEAR)
            self._stream.flush()


def _money(amount: float) -> str:
    """Return an amount with two digits after the point, and a small one with two digits that count."""
    return f"{amount:,.2f}" if amount == 0 or amount >= 0.095 else f"{amount:.2g}"  # noqa: PLR2004  # 0.10 with two digits


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= _DAY_S:
        return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
    if whole >= _HOUR_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    if whole >= _MINUTE_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    return f"{whole} s"
