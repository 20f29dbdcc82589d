"""Print user errors as a message plus the user's own stack frames, without the library's."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import heterotrain_core

_OWN = tuple(f"{Path(each).resolve().parent}/" for each in (__file__, heterotrain_core.__file__))
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_hooked: set[type[BaseException]] = set()


def show_script_only(kind: type[BaseException]) -> None:
    """Remove this package's frames from uncaught errors of ``kind``, before the present ``sys.excepthook`` gets them.

    In Python's development mode (``python -X dev``), tracebacks stay complete.
    """
    if kind in _hooked or sys.flags.dev_mode:
        return
    _hooked.add(kind)
    previous = sys.excepthook

    def on_exception(found: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(found, kind):
            trace = script_frames(trace)
            error.__traceback__ = trace  # the interpreter's own hook looks here first
            error.__cause__ = None  # also hides the context; the message already contains what matters of it
        previous(found, error, trace)

    sys.excepthook = on_exception


def script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without frames of this package and of libraries that it has called."""
    kept: list[TracebackType] = []
    inside = False
    for each in _frames(trace):
        path = str(Path(each.tb_frame.f_code.co_filename).resolve())
        inside = inside or path.startswith(_OWN)
        if not path.startswith((*_OWN, *_LIBRARIES) if inside else _OWN):
            kept.append(each)
    shown: TracebackType | None = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
