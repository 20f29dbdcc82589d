"""What a person sees of an error that his script has to mend: the sentence and his own lines, not where we found out."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import heterotrain_core

_OURS = tuple(f"{Path(each).resolve().parent}/" for each in (__file__, heterotrain_core.__file__))
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_told: set[type[BaseException]] = set()


def show_script_only(kind: type[BaseException]) -> None:
    """Let uncaught errors of a kind be told without frames of ours, from now on; whatever hook there is gets them so.

    In Python's development mode (``python -X dev``) they are told whole.
    """
    if kind in _told or sys.flags.dev_mode:
        return
    _told.add(kind)
    previous = sys.excepthook

    def on_exception(found: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(found, kind):
            trace = script_frames(trace)
            error.__traceback__ = trace  # the interpreter's own hook looks here first
            error.__cause__ = None  # which hides the context as well; the sentence has what it said
        previous(found, error, trace)

    sys.excepthook = on_exception


def script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our frames, and without those of libraries that we have called."""
    kept: list[TracebackType] = []
    inside = False
    for each in _frames(trace):
        path = str(Path(each.tb_frame.f_code.co_filename).resolve())
        inside = inside or path.startswith(_OURS)
        if not path.startswith((*_OURS, *_LIBRARIES) if inside else _OURS):
            kept.append(each)
    shown: TracebackType | None = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
