"""The launcher: the ranks of a pod end together and leave one outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from heterotrain.launch import merge
from heterotrain_core.contract import env
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, decode_outcome
from support.waiting import wait_until

ROOT = Path(__file__).parents[3]
LIMIT_S = 120.0


def an_outcome(ending: Ending, *, step: int = 3) -> Outcome:
    """Return the outcome of a rank."""
    return Outcome(ending=ending, reason=f"because {ending}", epoch=1, step=step)


FINISHED, LEFT, FAILED = (an_outcome(ending) for ending in Ending)


@pytest.mark.parametrize(
    ("outcomes", "codes", "ending", "reason"),
    [
        ([FINISHED, FINISHED], [0, 0], Ending.FINISHED, "because finished"),
        ([FINISHED, LEFT], [0, 0], Ending.LEFT, "because left"),
        ([LEFT, FAILED], [0, 1], Ending.FAILED, "rank 1: because failed"),
        ([FINISHED, None], [0, -9], Ending.FAILED, "rank 1 was ended by SIGKILL"),
        ([FINISHED, FINISHED], [0, -11], Ending.FINISHED, "because finished"),
        ([LEFT, LEFT], [0, -15], Ending.LEFT, "because left"),
        ([LEFT, None], [0, -15], Ending.FAILED, "rank 1 was ended by SIGTERM"),
        ([LEFT, LEFT], [0, 3], Ending.FAILED, "rank 1 ended with exit code 3"),
        ([FINISHED, None], [0, 3], Ending.FAILED, "rank 1 ended with exit code 3"),
        (
            [FINISHED, None],
            [0, 0],
            Ending.FAILED,
            "rank 1 ended without an outcome: check that the script calls heterotrain.init()",
        ),
    ],
)
def test_outcomes_are_merged(outcomes: list[Outcome | None], codes: list[int], ending: Ending, reason: str) -> None:
    """One failure is a failure, one leave is a leave; a rank that crashes after its outcome keeps it."""
    merged = merge(outcomes, codes, told=False)
    assert (merged.ending, merged.reason) == (ending, reason)


@pytest.mark.parametrize(
    ("outcomes", "codes", "reason"),
    [
        ([None, None, None], [-15, 1, -15], "rank 1 ended with exit code 1: ValueError: b"),
        ([None, None, None], [-15, -11, -15], "rank 1 was ended by SIGSEGV: ValueError: b"),
        ([None, FAILED, None], [-15, 1, -9], "rank 1: because failed"),
        ([FAILED, FAILED, None], [1, 1, -9], "rank 1: because failed"),
    ],
)
def test_the_rank_that_failed_first_is_the_reason(
    outcomes: list[Outcome | None], codes: list[int], reason: str
) -> None:
    """The launcher ended the others."""
    merged = merge(outcomes, codes, told=False, errors=["", "ValueError: b", "KeyError: c"], first=1)
    assert (merged.ending, merged.reason) == (Ending.FAILED, reason)


@pytest.mark.parametrize(
    ("codes", "told", "ending", "cause"),
    [
        ([0, 0], False, Ending.FINISHED, Cause.PLAIN_SCRIPT),
        ([0, 0], True, Ending.LEFT, Cause.PLAIN_SCRIPT),
        ([0, 1], False, Ending.FAILED, None),
    ],
)
def test_a_script_without_heterotrain_ends_as_its_exit_code_says(
    codes: list[int], told: bool, ending: Ending, cause: Cause | None
) -> None:
    merged = merge([None] * len(codes), codes, told=told, errors=["", "OSError: disk"])
    assert (merged.ending, merged.cause) == (ending, cause)
    assert merged.reason.endswith("OSError: disk") == (ending is Ending.FAILED)


def test_the_furthest_rank_determines_the_progress() -> None:
    """Epoch and step are the maxima over the ranks."""
    assert merge([an_outcome(Ending.LEFT, step=7), an_outcome(Ending.LEFT, step=8)], [0, 0], told=False).step == 8


def test_the_newest_checkpoint_of_all_ranks_is_the_pod_s() -> None:
    """Its step and its time stay together, whichever rank wrote it; most ranks write none."""
    older = replace(LEFT, checkpoint_step=9, checkpoint_time_s=100.0)
    newer = replace(LEFT, checkpoint_step=7, checkpoint_time_s=200.0)
    for outcomes in ([LEFT, older, newer, None], [newer, None, older, LEFT], [FAILED, older, newer, LEFT]):
        merged = merge(outcomes, [0, 0, 0, 0], told=True)
        assert (merged.checkpoint_step, merged.checkpoint_time_s) == (7, 200.0)
    without = merge([LEFT, FINISHED], [0, 0], told=False)
    assert (without.checkpoint_step, without.checkpoint_time_s) == (None, None)


def test_a_pod_terminated_before_its_ranks_handle_signals_has_left() -> None:
    """Death by SIGTERM before its handler exists is not a failure, but only if the pod received SIGTERM."""
    early = merge([None, LEFT], [-signal.SIGTERM, 0], told=True)
    assert (early.ending, early.reason) == (Ending.LEFT, "received SIGTERM before it had joined")
    assert merge([None], [-signal.SIGKILL], told=True).ending is Ending.FAILED
    assert merge([None], [-signal.SIGTERM], told=False).ending is Ending.FAILED


SLOW_START = """
import os, subprocess, sys
class Slow(subprocess.Popen):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
subprocess.Popen = Slow
from heterotrain.launch import main
main(sys.argv[1:])
"""
"""A launcher in which every rank ends before the next one starts."""


def launch(
    tmp_path: Path, script: str, *, ranks: int, slowly: bool = False, operated: bool = True
) -> subprocess.Popen[str]:
    """Start the launcher on a script that does not load torch."""
    path = tmp_path / "script.py"
    path.write_text(script)
    environ = {
        "PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'trainer'}", env.JOB_UID: "j",
        env.NUM_PROC_PER_WORKER: str(ranks), env.TERMINATION_PATH: str(tmp_path / "outcome"), "FOLDER": str(tmp_path),
    }  # fmt: skip
    if not operated:
        del environ[env.JOB_UID]
    how = ["-c", SLOW_START] if slowly else ["-m", "heterotrain.launch"]
    command = [sys.executable, *how, str(path), "--argument"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome_of(tmp_path: Path) -> Outcome | None:
    """Return the outcome of the pod."""
    return decode_outcome((tmp_path / "outcome").read_text())


PREAMBLE = """
import os, sys, json, pathlib, signal, time
rank = int(os.environ["HETEROTRAIN_LOCAL_RANK"])
folder = pathlib.Path(os.environ["FOLDER"])
def say(ending):
    outcome = {"ending": ending, "reason": "r", "epoch": 0, "step": rank}
    pathlib.Path(os.environ["HETEROTRAIN_TERMINATION_PATH"]).write_text(json.dumps(outcome))
"""


@pytest.mark.parametrize("slowly", [False, True])
def test_every_rank_gets_its_number_and_the_arguments(tmp_path: Path, slowly: bool) -> None:
    """The script runs once per rank with the same command line, even if it ends before the next rank starts."""
    script = PREAMBLE + "(folder / f'r{rank}').write_text(sys.argv[1]); say('finished')"
    running = launch(tmp_path, script, ranks=3, slowly=slowly)
    assert running.wait(timeout=LIMIT_S) == 0
    assert [(tmp_path / f"r{rank}").read_text() for rank in range(3)] == ["--argument"] * 3
    assert outcome_of(tmp_path) == Outcome(ending=Ending.FINISHED, reason="r", epoch=0, step=2)


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    """The pod leaves when its ranks have left."""
    body = (
        "def go(*_):\n    say('left'); sys.exit(0)\nsignal.signal(signal.SIGTERM, go)\n"
        "(folder / f'r{rank}').touch()\nwhile True: time.sleep(0.05)"
    )
    running = launch(tmp_path, PREAMBLE + body, ranks=2)
    wait_until(lambda: all((tmp_path / f"r{rank}").exists() for rank in range(2)), "both ranks run", timeout_s=LIMIT_S)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=LIMIT_S) == 0
    found = outcome_of(tmp_path)
    assert found is not None
    assert found.ending is Ending.LEFT
    assert found.told


@pytest.mark.parametrize(("script", "code"), [("raise ValueError('RANK expected, but not set')", 1), ("print(1)", 0)])
def test_a_script_without_heterotrain_has_an_outcome(tmp_path: Path, script: str, code: int) -> None:
    """Its last error, or that it succeeded; its error output is passed on."""
    running = launch(tmp_path, script, ranks=2)
    _, errors = running.communicate(timeout=LIMIT_S)
    assert running.returncode == code
    found = outcome_of(tmp_path)
    assert found is not None
    if code:
        assert found.ending is Ending.FAILED
        assert found.reason.endswith("ended with exit code 1: ValueError: RANK expected, but not set")
        assert "ValueError: RANK expected" in errors
    else:
        assert (found.ending, found.cause) == (Ending.FINISHED, Cause.PLAIN_SCRIPT)


def test_a_failed_rank_terminates_the_others(tmp_path: Path) -> None:
    """They get SIGTERM, and the pod ends with the failed rank's exit code."""
    body = "if rank == 1: sys.exit(7)\nwhile True: time.sleep(0.05)"
    running = launch(tmp_path, PREAMBLE + body, ranks=3)
    assert running.wait(timeout=LIMIT_S) == 7
    assert running.stderr is not None
    assert "rank 1 ended with exit code 7" in running.stderr.read()
    found = outcome_of(tmp_path)
    assert found is not None
    assert found.ending is Ending.FAILED


@pytest.mark.parametrize(
    ("body", "code"),
    [("", 0), ("sys.exit(143)", 143), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)],
)
def test_without_an_operator_the_exit_code_is_that_of_the_script(tmp_path: Path, body: str, code: int) -> None:
    """There is no termination message then; a rank that a signal has ended counts as in a shell."""
    running = launch(tmp_path, PREAMBLE + body, ranks=1, operated=False)
    assert running.wait(timeout=LIMIT_S) == code
    assert not (tmp_path / "outcome").exists()


def test_orphans_are_reaped_and_ignored(tmp_path: Path) -> None:
    """A grandchild that outlives its parent changes nothing for the ranks' outcome."""
    body = "import subprocess\nsubprocess.Popen(['true'])\nsubprocess.Popen(['sh', '-c', 'exit 5'])\nsay('finished')"
    running = launch(tmp_path, PREAMBLE + body, ranks=2)
    assert running.wait(timeout=LIMIT_S) == 0


def test_the_launcher_never_loads_torch() -> None:
    """Its signal handlers are in place at once."""
    code = "import sys, heterotrain.launch; print('torch' in sys.modules)"
    path = {"PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'trainer'}"}
    found = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_usage() -> None:
    """Without a script it prints its usage."""
    path = {"PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'trainer'}"}
    found = subprocess.run(
        [sys.executable, "-m", "heterotrain.launch"], env=path, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.startswith("usage: heterotrain-run")) == (2, True)


def test_ranks_may_open_more_descriptors_than_the_runtime_allows_at_first(tmp_path: Path) -> None:
    """Some runtimes start containers with 1024; what the container may have at most is kept."""
    script = tmp_path / "script.py"
    script.write_text("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    paths = os.pathsep.join(str(ROOT / part) for part in ("core", "trainer"))
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4000)); "
        "from heterotrain.launch import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, str(script)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["4000", "4000"]
