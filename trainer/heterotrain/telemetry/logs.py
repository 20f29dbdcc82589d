"""Log lines with the rank and its progress: text for people, JSON lines for machines.

All records of Python's ``logging`` are tagged, including those of the script and of libraries. In JSON mode, uncaught
exceptions and warnings become records too, so that each line that the trainer writes to stderr is a JSON object.
Passwords in URIs are hidden. The launcher uses this module as well, so it must not load torch.

A logging library would replace only ``JsonFormatter``, about 15 lines, and add a dependency to every training image.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType

from heterotrain_core.contract import env
from heterotrain_core.uris import redacted

from heterotrain.errors import UsageError

_log = logging.getLogger(__name__)

Tags = Mapping[str, str | int]
"""Fields of a line: ``job``, ``namespace``, ``worker``, ``local_rank``, ``rank``, ``formation``, ``epoch``, ``step``.

Unknown fields are left out. ``rank`` is the rank in the formation, ``epoch`` counts from 0, and ``step`` is the number
of committed steps.
"""


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


class Tagged(logging.Filter):
    """Adds the present tags to each record."""

    def __init__(self, who: Tags, where: Callable[[], Tags], before: Callable[[], None]) -> None:
        """Tag records as ``set_up_logs`` says."""
        super().__init__()
        self._who, self._where, self._before = who, where, before

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record."""
        self._before()
        record.tags = {**self._who, **self._where()}
        return True


class TextFormatter(logging.Formatter):
    """``time [digits-w1/0 rank 2 epoch 3 step 117] message``; from WARNING on with the level."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; a traceback follows on separate lines."""
        tags: Tags = getattr(record, "tags", {})
        worker, local_rank = tags.get("worker"), tags.get("local_rank")
        who = [f"{worker}/{local_rank}" if local_rank is not None else str(worker)] if worker is not None else []
        who += [f"{name} {tags[name]}" for name in ("rank", "epoch", "step") if name in tags]
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        # The base class appends the traceback to the message; the time goes in front of both.
        return f"{self.formatTime(record)} [{' '.join(who)}] {level}{redacted(super().format(record))}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the operator's field names: ``timestamp``, ``level``, ``logger``, ``event``.

    The timestamp is ISO 8601 in UTC with microseconds; ``exception`` holds the traceback, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        tags: Tags = getattr(record, "tags", {})
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": redacted(record.getMessage()),
            **tags,
        }
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(
    who: Tags,
    *,
    where: Callable[[], Tags] = dict,
    before: Callable[[], None] = lambda: None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Send tagged log records to stderr, unless the script has already set up logging itself.

    Args:
        who: constant tags.
        where: called for each record, from any thread; returns tags that override those of ``who``.
        before: called before each record is written.
        environ: environment, in which ``HETEROTRAIN_LOG_FORMAT`` is ``text`` (the default) or ``json``.

    Raises:
        UsageError: the variable has another value.
    """
    wanted = environ.get(env.LOG_FORMAT) or LogFormat.TEXT
    if wanted not in tuple(LogFormat):
        raise UsageError(f"{env.LOG_FORMAT} must be text or json, not {wanted!r}")
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Tagged(who, where, before))
    handler.setFormatter(JsonFormatter() if wanted == LogFormat.JSON else TextFormatter())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    if wanted == LogFormat.JSON:
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = _log_thread_exception


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _log.critical("the script ended by an exception: %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_thread_exception(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None:
        name = ended.thread.name if ended.thread else "unknown"
        _log.error(
            "thread %s ended by an exception", name, exc_info=(ended.exc_type, ended.exc_value, ended.exc_traceback)
        )
