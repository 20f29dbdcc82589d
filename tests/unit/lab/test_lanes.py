"""Lanes of programs run side by side; the first failure or Ctrl-C stops them, and outputs are not mixed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.testing import lanes
from lab.testing.lanes import Failed, Programs
from support.waiting import wait_until

AWAITS = 'until [ -e "$1" ]; do sleep 0.01; done; '


def shell(programs: Programs, name: str, code: str, *arguments: Path, yields: bool = False) -> None:
    """Run shell code with arguments."""
    programs.run(name, "sh", "-c", code, name, *map(str, arguments), yields=yields)


def test_lanes_run_side_by_side_and_each_output_is_one_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each program can end only while the other one runs."""
    programs, one, two = Programs(tmp_path), tmp_path / "one", tmp_path / "two"
    programs.side_by_side(
        [
            lambda: shell(programs, "first", f'echo 1a; touch "$2"; {AWAITS} echo 1b', two, one),
            lambda: shell(programs, "second", f'echo 2a; touch "$2"; {AWAITS} echo 2b', one, two),
        ]
    )
    printed = capsys.readouterr().out
    assert "1a\n1b\n" in printed
    assert "2a\n2b\n" in printed
    assert sorted(programs.seconds) == ["first", "second"]


def test_the_first_failure_interrupts_the_other_lane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other program may clean up, nothing else is started, and the failed one's output is printed."""
    programs, ready, cleaned, never = Programs(tmp_path), tmp_path / "ready", tmp_path / "cleaned", tmp_path / "never"

    def long() -> None:
        waits = 'trap "touch \\"$2\\"; exit 1" INT; touch "$1"; while :; do sleep 0.01; done'
        shell(programs, "long", waits, ready, cleaned)
        never.touch()

    with pytest.raises(Failed, match="broken"):
        programs.side_by_side([long, lambda: shell(programs, "broken", f"{AWAITS} echo why; exit 3", ready)])
    assert cleaned.exists()
    assert not never.exists()
    printed = capsys.readouterr().out
    assert "broken: FAILED" in printed
    assert "why\n" in printed
    assert "long: started" in printed
    assert printed.count("long: ") == 1, "an interrupted program has neither passed nor failed"


def test_a_failure_that_may_happen_is_named_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next program of its lane runs, and so does the other lane."""
    programs, next_one, other = Programs(tmp_path), tmp_path / "next", tmp_path / "other"

    def tests() -> None:
        programs.run("tests", "sh", "-c", "echo why; exit 1", may_fail=True)
        shell(programs, "next", 'touch "$1"', next_one)

    programs.side_by_side([tests, lambda: shell(programs, "other", f'{AWAITS} touch "$2"', next_one, other)])
    assert other.exists()
    assert programs.failed == ["tests"]
    assert "why\n" in capsys.readouterr().out


def test_a_program_that_ignores_the_interruption_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lanes end, and nothing keeps running."""
    monkeypatch.setattr(lanes, "ENDS_S", 0.1)
    programs, child = Programs(tmp_path), tmp_path / "child"
    deaf = 'trap "" INT; sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; wait'

    def breaks() -> None:
        shell(programs, "waiting", AWAITS, child)
        raise ValueError("no cluster")

    with pytest.raises(ValueError, match="no cluster"):
        programs.side_by_side([lambda: shell(programs, "deaf", deaf, child), breaks])
    wait_until(lambda: has_ended(child.read_text().strip()), "the child ends", timeout_s=60)


def has_ended(pid: str) -> bool:
    """Return whether a process has ended, perhaps unnoticed by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ctrl_c_reaches_every_program(tmp_path: Path) -> None:
    """They are in sessions of their own, so the terminal sends them nothing; a job in the background ignores it."""
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    programs, ready, cleaned = Programs(tmp_path), tmp_path / "ready", tmp_path / "cleaned"
    waits = 'trap "touch \\"$2\\"; exit 1" INT; touch "$1"; while :; do sleep 0.01; done'

    def interrupts() -> None:
        shell(programs, "waiting", AWAITS, ready)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            programs.side_by_side([lambda: shell(programs, "long", waits, ready, cleaned), interrupts])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert cleaned.exists()


def test_programs_that_yield_do_so_until_the_others_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run already and those that are started meanwhile."""
    set_to: list[int] = []
    monkeypatch.setattr(lanes, "_set_niceness", lambda _process, niceness: set_to.append(niceness))
    programs, early, late, end = Programs(tmp_path), tmp_path / "early", tmp_path / "late", tmp_path / "end"
    touches = 'touch "$2"; ' + AWAITS

    def yielding() -> None:
        shell(programs, "early", touches, late, early, yields=True)
        shell(programs, "later", touches, end, tmp_path / "later", yields=True)

    def building() -> None:
        shell(programs, "first", AWAITS, early)
        programs.hold_back()
        shell(programs, "second", touches, tmp_path / "later", late)
        programs.go_on()
        end.touch()

    programs.side_by_side([yielding, building])
    assert set_to == [lanes.BEHIND, lanes.BEHIND, 0]


def test_jobs_take_free_places_in_their_order(tmp_path: Path) -> None:
    """The first two can end only together, so they run at once; the third starts when one of them has ended.

    It may end before the other one of them.
    """
    programs, one, two = Programs(tmp_path), tmp_path / "one", tmp_path / "two"
    order: list[str] = []

    def job(name: str, own: Path, other: Path) -> Callable[[], None]:
        def run() -> None:
            shell(programs, name, f'touch "$1"; {AWAITS.replace("$1", "$2")}', own, other)
            order.append(name)

        return run

    jobs = [job("first", one, two), job("second", two, one), job("third", tmp_path / "three", one)]
    programs.drain(jobs, at_once=2)
    assert sorted(order) == ["first", "second", "third"]
    assert order[0] != "third"


def test_a_failed_job_ends_the_others(tmp_path: Path) -> None:
    programs, never = Programs(tmp_path), tmp_path / "never"
    with pytest.raises(Failed, match="broken"):
        programs.drain([lambda: shell(programs, "broken", "exit 3"), never.touch], at_once=1)
    assert not never.exists()


def test_long_work_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lanes, "PROGRESS_S", 0.0)
    told = tmp_path / "told"

    def progress(name: str) -> str:
        told.touch()
        return f"{name} 3 of 7"

    programs = Programs(tmp_path, progress=progress)
    programs.side_by_side([lambda: shell(programs, "long", AWAITS, told)])
    assert "long 3 of 7" in capsys.readouterr().out
