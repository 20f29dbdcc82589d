"""Log lines that say which rank speaks and how far it is: text for people, JSON lines for machines.

Whatever goes through Python's ``logging`` is tagged, the script's own records and those of libraries included. In JSON,
uncaught exceptions and warnings become records, too, so that no line of ours on stderr is anything else. It is used by
the launcher as well and never loads torch.
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

from heterotrain.errors import UsageError

_log = logging.getLogger(__name__)

Tags = Mapping[str, str | int]
"""What every line says of who speaks: ``job``, ``namespace``, ``worker``, ``local_rank``, ``rank``, ``formation``, ``epoch``,
``step``, each where it is known: ``rank`` counts within the formation, ``epoch`` from 0, ``step`` what is committed so far."""


class LogFormat(StrEnum):
    """How lines look."""

    TEXT = "text"
    JSON = "json"


class Tagged(logging.Filter):
    """Gives each record the tags of the moment.

    Attributes:
        where: called for each record, from any thread: returns how far this rank is.
    """

    def __init__(self, who: Tags) -> None:
        """``who`` are the tags that stay; those of ``where`` win over them."""
        super().__init__()
        self._who = who
        self.where: Callable[[], Tags] = dict

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record."""
        record.tags = {**self._who, **self.where()}
        return True


class TextFormatter(logging.Formatter):
    """``time [digits-w1/0 rank 2 epoch 3 step 117] message``; warnings and worse say so."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; a traceback takes lines of its own."""
        tags: Tags = getattr(record, "tags", {})
        worker, local_rank = tags.get("worker"), tags.get("local_rank")
        who = [f"{worker}/{local_rank}" if local_rank is not None else str(worker)] if worker is not None else []
        who += [f"{name} {tags[name]}" for name in ("rank", "epoch", "step") if name in tags]
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        # The base class adds the traceback to what it makes of the message; the time goes in front of both.
        return f"{self.formatTime(record)} [{' '.join(who)}] {level}{super().format(record)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the operator's field names: ``timestamp``, ``level``, ``logger``, ``event``.

    The timestamp is ISO 8601 in UTC, to the microsecond; ``exception`` holds a traceback where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        tags: Tags = getattr(record, "tags", {})
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **tags,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(who: Tags, *, environ: Mapping[str, str] = os.environ) -> Tagged:
    """Send log records to stderr, tagged; a script that has set up logging itself keeps what it has.

    Args:
        who: tags that stay.
        environ: ``HETEROTRAIN_LOG_FORMAT`` in it is ``text`` (as when absent) or ``json``.

    Returns:
        What tags the records, so that ``where`` can be set; nothing passes through it where the script has handlers of its own.

    Raises:
        UsageError: the variable holds something else.
    """
    wanted = environ.get(env.LOG_FORMAT) or LogFormat.TEXT
    if wanted not in tuple(LogFormat):
        raise UsageError(f"{env.LOG_FORMAT} has to be text or json, not {wanted!r}")
    tagged, root = Tagged(who), logging.getLogger()
    if root.handlers:
        return tagged
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(tagged)
    handler.setFormatter(JsonFormatter() if wanted == LogFormat.JSON else TextFormatter())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    if wanted == LogFormat.JSON:
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = _log_thread_exception
    return tagged


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _log.critical("the script ended by an exception: %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_thread_exception(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None:
        name = ended.thread.name if ended.thread else "unknown"
        _log.error(
            "thread %s ended by an exception", name, exc_info=(ended.exc_type, ended.exc_value, ended.exc_traceback)
        )
