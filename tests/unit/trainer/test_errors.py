"""Errors that are kept do not keep what their frames held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from heterotrain.errors import PeerLost, drop_frames


class _Connections:
    """Stands for what a frame's variables hold."""


class _Holder:
    failure: Exception | None = None


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Only reference counts release objects."""
    gc.disable()
    yield
    gc.enable()


def _fail(holder: _Holder, seen: list[weakref.ref[_Connections]]) -> None:
    connections = _Connections()
    seen.append(weakref.ref(connections))
    try:
        try:
            raise RuntimeError(f"a connection broke for {holder!r}")  # noqa: TRY301  # the frame holds the holder
        except RuntimeError as error:
            raise PeerLost("a peer is lost") from error
    except PeerLost as lost:
        holder.failure = lost


@pytest.mark.usefixtures("without_collector")
def test_a_kept_error_keeps_its_frames_until_they_are_dropped() -> None:
    holder, seen = _Holder(), list[weakref.ref[_Connections]]()
    _fail(holder, seen)
    assert seen[0]() is not None
    assert holder.failure is not None
    drop_frames(holder.failure)
    assert seen[0]() is None
    assert isinstance(holder.failure.__cause__, RuntimeError)  # the messages stay


def test_errors_that_cause_each_other_are_no_endless_loop() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    drop_frames(one)
    assert one.__traceback__ is None
