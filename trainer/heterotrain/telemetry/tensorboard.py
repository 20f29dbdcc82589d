"""TensorBoard files: curves and events of a training.

Only the lowest rank writes, in a separate thread: the training thread queues a few numbers and never waits. Points
are at least ``GAP_S`` apart, so short steps do not cost more than long ones. When another rank becomes the lowest, or a
job is resumed, a new file begins. Its first event makes TensorBoard drop the points of an abandoned attempt.
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
"""Seconds between two points: curves show no more detail, and each point takes the interpreter a millisecond."""
FLUSH_S = 2.0
"""Seconds between two flushes, the longest delay of points in the files."""
PENDING = 1000
"""Points that may wait for a slow disk."""
CLOSE_S = 5.0
"""Time limit for writing the last points when the training ends."""

TAGS = {
    names.LOSS: "train/loss",
    names.GLOBAL_BATCH: "train/global_batch_samples",
    names.NOISE_SCALE: "train/noise_scale_samples",
    names.EPOCH: "progress/epoch",
    names.WORLD_SIZE: "progress/ranks",
    names.CHECKPOINT_STEP: "progress/checkpoint_step",
}
"""Gauges of the rank's telemetry that become curves, with their TensorBoard tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The output for one committed step: values of curves, or an event as text.

    Attributes:
        step: committed steps since the job began, including this one.
        at_s: seconds since 1970.
        scalars: values by TensorBoard tag, each in the unit that its name gives.
        text: Markdown under the tag ``events``; empty for none.
    """

    step: int
    at_s: float = field(default_factory=time.time)
    scalars: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


class TensorBoardWriter:
    """Writes this rank's part of the job's TensorBoard files."""

    def __init__(self, folder: str, identity: Identity, *, report: Report) -> None:
        """Check the arguments; files are created with the first point.

        Args:
            folder: folder for the files; each job under an operator gets its own folder below it.
            identity: this rank, part of the names of its files.
            report: its telemetry, the source of the curves.

        Raises:
            UsageError: the library is missing, or the folder is not a path.
        """
        if importlib.util.find_spec("tensorboardX") is None:
            raise UsageError("TensorBoard files need tensorboardX: run pip install 'heterotrain[tensorboard]'")
        if "://" in folder and not folder.startswith("file://"):
            raise UsageError(
                f"the TensorBoard folder {folder!r} is not a path: set a folder, in a pod one of a mounted volume"
            )
        own = f"{identity.namespace}-{identity.job_name}-{identity.job_uid}"
        base = Path(folder.removeprefix("file://"))
        self._folder = base / own if identity.mode is Mode.OPERATED else base
        self._name = f"{identity.worker}-{identity.local_rank}"
        self._report = report
        self._file: WriterThread | None = None
        self._files = 0
        self._written_roster: Roster | None = None
        self._written_formation = ""
        self._written_plan = (-1, -1)
        self._last: tuple[float, float] | None = None

    def committed(self, active_group: ActiveGroup, optimizers: Sequence[torch.optim.Optimizer], *, step: int) -> None:
        """Write a point for a committed step if this is the lowest rank and the last point is ``GAP_S`` old.

        Args:
            active_group: the formation that committed the step.
            optimizers: their learning rates are written.
            step: committed steps, including this one.
        """
        if active_group.rank != 0:
            self.close()
            return
        if self._file is None:
            self._files += 1
            self._file = WriterThread(self._folder, suffix=f".{self._name}.{self._files}", first_step=step)
            self._written_roster, self._written_formation, self._last = None, "", None
            atexit.register(self.close)
        if active_group.roster is not self._written_roster:
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
        for rank, position in zip(roster.ranks, roster.positions, strict=True):
            if (rank.stage, rank.shard) == (0, 0):  # a member is named for its first rank
                scalars[f"share_samples/{rank.worker}/{rank.local_rank}"] = roster.shares[position]
        self._file.put(Point(step=step, scalars=scalars))

    def close(self) -> None:
        """Write pending points and values reported since the last step; a later step begins another file."""
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
        """Write each formation and each plan as text, once."""
        roster = active_group.roster
        formation, version = str(roster.formation), roster.plan.version
        if formation != self._written_formation:
            who = ", ".join(f"{rank.worker}/{rank.local_rank}" for rank in roster.ranks)
            file.put(Point(step=step, text=f"formation {formation}: {who}"))
        elif version != self._written_plan:
            why = f" ({roster.plan.reason})" if roster.plan.reason else ""
            file.put(Point(step=step, text=f"plan {version[0]}.{version[1]}: shares {list(roster.shares)}{why}"))
        self._written_roster, self._written_formation, self._written_plan = roster, formation, version


class WriterThread:
    """A file and the thread that writes it. A failing disk causes a warning and missing curves only."""

    def __init__(self, folder: Path, *, suffix: str, first_step: int) -> None:
        """Start the thread; arguments are those of ``EventFile``."""
        self._folder = folder
        self._points: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, args=(suffix, first_step), name="heterotrain-tensorboard", daemon=True
        )
        self._thread.start()

    def put(self, point: Point) -> None:
        """Queue a point and return at once; points are dropped after an error, or if the disk is ``PENDING`` behind."""
        if self._is_stopped:
            return
        if self._points.qsize() >= PENDING:
            self._is_stopped = True
            _log.warning("no more TensorBoard points are written: %s is too slow", self._folder)
            return
        self._points.put(point)

    def close(self) -> None:
        """Wait until everything is written, for at most ``CLOSE_S``."""
        self._points.put(None)
        self._thread.join(CLOSE_S)

    def _run(self, suffix: str, first_step: int) -> None:
        file: EventFile | None = None
        try:
            file = EventFile(self._folder, suffix=suffix, first_step=first_step)
            self._copy(file)
        except OSError as error:
            self._is_stopped = True
            _log.warning("no more TensorBoard points are written: %s: %s", self._folder, error)
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
    """One event file for TensorBoard; not thread-safe."""

    def __init__(self, folder: Path, *, suffix: str, first_step: int) -> None:
        """Begin a file that invalidates points from ``first_step`` on in older files.

        TensorBoard drops those points when it reads this file's first event, a ``SessionLog`` with the status START
        (see its ``event_accumulator.py``; files of version 2 or later).

        Args:
            folder: folder for all files of the job; created if missing.
            suffix: end of the file's name.
            first_step: step of the first point, counted as in ``Point``.

        Raises:
            OSError: the folder cannot be written.
        """
        from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415  # optional, and half a second to load
        from tensorboardX.proto import event_pb2  # noqa: PLC0415  # as above

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
        from tensorboardX import summary  # noqa: PLC0415  # as above

        event = self._proto.Event(wall_time=point.at_s, step=point.step)
        for tag, value in point.scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        if point.text:
            event.summary.MergeFrom(summary.text("events", point.text))
        self._writer.write_event(event)

    def flush(self) -> None:
        """Write everything to the file system.

        Raises:
            OSError: the file cannot be written.
        """
        self._writer.flush()

    def close(self) -> None:
        """Flush and close.

        Raises:
            OSError: the last points could not be written.
        """
        self._writer.close()
