"""TensorBoard files: how a training goes, for people who look at curves.

Only the lowest rank writes, in a thread of its own: the training thread hands a few numbers over and never waits. Points
are at least ``GAP_S`` apart, so that a step of a millisecond costs as little as one of a second. When another rank becomes
the lowest, or a job is resumed, a new file begins with a mark from which TensorBoard drops what an abandoned attempt wrote.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from heterotrain_core.contract import metrics as names

from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import Roster
from heterotrain.telemetry.report import Report

_log = logging.getLogger(__name__)

GAP_S = 1.0
"""Between two points: one a second is what a curve shows of a training, and each costs the interpreter about a millisecond."""
FLUSH_S = 2.0
"""Between two flushes: how long what happened may be missing from the files."""
PENDING = 1000
"""Points that may wait for a slow disk."""
CLOSE_S = 5.0
"""For the last points to be written when the training ends."""

TAGS = {
    names.LOSS: "train/loss",
    names.GLOBAL_BATCH: "train/global_batch_samples",
    names.NOISE_SCALE: "train/noise_scale_samples",
    names.EPOCH: "progress/epoch",
    names.WORLD_SIZE: "progress/ranks",
    names.CHECKPOINT_STEP: "progress/checkpoint_step",
}
"""Which gauges of the rank's telemetry become curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is written about one committed step: curves, or an event in words.

    Attributes:
        step: committed steps since the job began, this one included.
        at_s: seconds since 1970.
        scalars: values by TensorBoard's tag, each in the unit that its name says.
        text: Markdown under the tag ``events``; empty for none.
    """

    step: int
    at_s: float = field(default_factory=time.time)
    scalars: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


class TensorBoardWriter:
    """This rank's part in the TensorBoard files of its job."""

    def __init__(self, folder: str, identity: Identity, *, report: Report) -> None:
        """Write nothing yet.

        Args:
            folder: where the files go; jobs of a cluster get folders of their own below it.
            identity: this rank, which names its files.
            report: its telemetry, from which the curves are taken.

        Raises:
            UsageError: the library is missing, or the folder is no path.
        """
        if importlib.util.find_spec("tensorboardX") is None:
            raise UsageError("TensorBoard files need the package tensorboardX: pip install 'heterotrain[tensorboard]'")
        if "://" in folder and not folder.startswith("file://"):
            raise UsageError(
                f"the TensorBoard folder {folder!r} is no path: name a folder, of a mounted volume in a pod"
            )
        own = f"{identity.namespace}-{identity.job_name}-{identity.job_uid}"
        base = Path(folder.removeprefix("file://"))
        self._folder = base / own if identity.mode is Mode.OPERATED else base
        self._name = f"{identity.worker}-{identity.local_rank}"
        self._report = report
        self._file: WriterThread | None = None
        self._files = 0
        self._said_roster: Roster | None = None
        self._said_formation = ""
        self._said_plan = (-1, -1)
        self._last: tuple[float, float] | None = None

    def committed(self, active_group: ActiveGroup, optimizers: Sequence[torch.optim.Optimizer], *, step: int) -> None:
        """Note a committed step, when this is the lowest rank and the last point is long enough ago.

        Args:
            active_group: the formation that committed it.
            optimizers: whose learning rates are drawn.
            step: committed steps, this one included.
        """
        if active_group.rank != 0:
            self.close()
            return
        if self._file is None:
            self._files += 1
            self._file = WriterThread(self._folder, suffix=f".{self._name}.{self._files}", first_step=step)
            self._said_roster, self._said_formation, self._last = None, "", None
            atexit.register(self.close)
        if active_group.roster is not self._said_roster:
            self._events(self._file, active_group, step)
        now_s = time.perf_counter()
        if self._last is not None and now_s - self._last[0] < GAP_S:
            return
        gauges = self._report.current()
        scalars = self._curves(gauges)
        samples = gauges[names.SAMPLES_COMMITTED]
        if self._last is not None:
            scalars["train/samples_per_s"] = (samples - self._last[1]) / (now_s - self._last[0])
        self._last = (now_s, samples)
        scale = gauges.get(names.LEARNING_RATE_SCALE, 1.0)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        for number, rate in enumerate(rates):
            scalars["train/learning_rate" + (f"_{number}" if number else "")] = float(rate) * scale
        roster = active_group.roster
        for member, share in zip(roster.members, roster.shares, strict=True):
            scalars[f"share_samples/{member.worker}/{member.local_rank}"] = share
        self._file.put(Point(step=step, scalars=scalars))

    def close(self) -> None:
        """Write what is pending, and what was reported since the last step; a later step begins another file."""
        file, self._file = self._file, None
        if file is not None:
            atexit.unregister(self.close)
            gauges = self._report.current()
            file.put(Point(step=int(gauges[names.STEP]), scalars=self._curves(gauges)))
            file.close()

    def _curves(self, gauges: Mapping[str, float]) -> dict[str, float]:
        curves = {tag: gauges[name] for name, tag in TAGS.items() if name in gauges}
        return curves | {f"script/{name}": value for name, value in self._report.reported().items()}

    def _events(self, file: WriterThread, active_group: ActiveGroup, step: int) -> None:
        """Put formations and plans into words, once each."""
        roster = active_group.roster
        formation, version = str(roster.formation), roster.plan.version
        if formation != self._said_formation:
            who = ", ".join(f"{member.worker}/{member.local_rank}" for member in roster.members)
            file.put(Point(step=step, text=f"formation {formation}: {who}"))
        elif version != self._said_plan:
            why = f" ({roster.plan.reason})" if roster.plan.reason else ""
            file.put(Point(step=step, text=f"plan {version[0]}.{version[1]}: shares {list(roster.shares)}{why}"))
        self._said_roster, self._said_formation, self._said_plan = roster, formation, version


class WriterThread:
    """A file and the thread that writes it; a store that refuses is told in a warning and costs curves, never the training."""

    def __init__(self, folder: Path, *, suffix: str, first_step: int) -> None:
        """Start the thread; arguments are those of ``EventFile``."""
        self._folder = folder
        self._points: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self._refuses = False
        self._thread = threading.Thread(
            target=self._run, args=(suffix, first_step), name="heterotrain-tensorboard", daemon=True
        )
        self._thread.start()

    def put(self, point: Point) -> None:
        """Hand a point over and return at once; it is left out when the disk is ``PENDING`` points behind, or refuses."""
        if self._refuses:
            return
        if self._points.qsize() >= PENDING:
            self._refuses = True
            _log.warning("no more TensorBoard points: %s takes them too slowly", self._folder)
            return
        self._points.put(point)

    def close(self) -> None:
        """Wait until everything is written, ``CLOSE_S`` at most."""
        self._points.put(None)
        self._thread.join(CLOSE_S)

    def _run(self, suffix: str, first_step: int) -> None:
        file: EventFile | None = None
        try:
            file = EventFile(self._folder, suffix=suffix, first_step=first_step)
            self._copy(file)
        except OSError as error:
            self._refuses = True
            _log.warning("no more TensorBoard points: %s cannot be written: %s", self._folder, error)
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def _copy(self, file: EventFile) -> None:
        flushed_s = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                point = self._points.get(timeout=FLUSH_S)
                if point is None:
                    return
                file.write(point)
            if time.monotonic() - flushed_s >= FLUSH_S:
                file.flush()
                flushed_s = time.monotonic()


class EventFile:
    """One file as TensorBoard reads it; not safe to use from several threads."""

    def __init__(self, folder: Path, *, suffix: str, first_step: int) -> None:
        """Begin a file that makes points of ``first_step`` and later ones in older files void.

        TensorBoard drops them when it reads this file's first event, a ``SessionLog`` with the status START (its
        ``event_accumulator.py``, from files of version 2 on).

        Args:
            folder: made when it is not there; all files of a job lie in it.
            suffix: how the file's name ends.
            first_step: of the first point, counted as in ``Point``.

        Raises:
            OSError: the folder cannot be written.
        """
        from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415 - optional, and half a second to load
        from tensorboardX.proto import event_pb2  # noqa: PLC0415 - as above

        self._proto: Any = event_pb2
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventsWriter(str(folder / "events"), suffix)
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, point: Point) -> None:
        """Append a point.

        Raises:
            OSError: the file cannot be written.
        """
        from tensorboardX import summary  # noqa: PLC0415 - as above

        event = self._proto.Event(wall_time=point.at_s, step=point.step)
        for tag, value in point.scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        if point.text:
            event.summary.MergeFrom(summary.text("events", point.text))
        self._writer.write_event(event)

    def flush(self) -> None:
        """Give everything to the file system.

        Raises:
            OSError: it does not take it.
        """
        self._writer.flush()

    def close(self) -> None:
        """Flush and close.

        Raises:
            OSError: the last points could not be written.
        """
        self._writer.close()
