"""The last error of a rank that wrote no outcome: what the job's status shows of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from heterotrain.error_output import KEPT_BYTES, MAX_ERROR, ErrorOutput, last_error

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{TRACE}ValueError: RANK expected, but not set\n", "ValueError: RANK expected, but not set"),
        (f"{TRACE}KeyError: 1\n\nDuring the handling:\n\n{TRACE}OSError: disk\n", "OSError: disk"),
        (f"{TRACE}OSError: disk\nresource_tracker: 1 leaked object\n", "OSError: disk"),
        ("".join(f"[rank3]: {line}\n" for line in f"{TRACE}NameError: x".splitlines()), "NameError: x"),
        ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --epoch\n\n",
         "train.py: error: unrecognized arguments: --epoch"),
        ("\x1b[31mred\x07", "[31mred"),
        (f"{TRACE}ValueError: {'x' * 9000}", f"ValueError: {'x' * 9000}"[:MAX_ERROR]),
        (TRACE, "main()"),
        ("", ""),
        ("\n \n", ""),
    ],
)  # fmt: skip
def test_the_last_error_of_an_output(text: str, expected: str) -> None:
    assert last_error(text) == expected


def test_output_is_passed_on_and_its_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """However much a process writes, everything arrives, and memory stays bounded."""
    output = ErrorOutput()
    lines = f"import sys\nfor i in range(20_000): print('row', i, file=sys.stderr)\nraise ValueError({KEPT_BYTES})"
    process = subprocess.Popen([sys.executable, "-c", lines], stderr=output.writer)
    output.close_writer()
    assert process.wait() == 1
    assert output.last_error() == f"ValueError: {KEPT_BYTES}"
    written = capfd.readouterr().err
    assert written.count("row ") == 20_000
    assert written.endswith(f"ValueError: {KEPT_BYTES}\n")


def test_a_process_left_behind_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the rank may keep the pipe open for ever."""
    monkeypatch.setattr("heterotrain.error_output.JOIN_S", 0.05)
    output = ErrorOutput()
    kept = os.dup(output.writer)
    try:
        output.close_writer()
        assert output.last_error() == ""
    finally:
        os.close(kept)
