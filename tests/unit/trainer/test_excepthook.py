"""Usage errors are printed as a message plus the script's own lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.zygote import Zygote, kept

SCRIPTS = {
    "after init": (
        "import heterotrain\n\njob = heterotrain.init()\nnext(iter(job.steps([1])))\n",
        "next(iter(job.steps([1])))",
        "call job.wrap(model)",
    ),
    "with a cause, in a function": (
        "import heterotrain\n\ndef go():\n    heterotrain.init(checkpoint_uri='no-such-protocol://x')\n\ngo()\n",
        "heterotrain.init(checkpoint_uri='no-such-protocol://x')",
        "no-such-protocol",
    ),
}


def run(zygote: Zygote, tmp_path: Path, text: str) -> str:
    """Run a script that has to fail; return its stderr."""
    script = tmp_path / "train.py"
    script.write_text(text)
    done = zygote.run(tmp_path, str(script))
    assert done.code == 1, done.text
    return done.stderr


def launched(tmp_path: Path, text: str, *options: str, **environment: str) -> str:
    """Run a script that has to fail by the launcher, in interpreters of their own; return their stderr."""
    script = tmp_path / "train.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, *options, "-m", "heterotrain.launch", str(script)],
        env=kept() | {"HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("case", SCRIPTS)
def test_users_see_the_message_and_their_own_lines(zygote: Zygote, tmp_path: Path, case: str) -> None:
    text, line, words = SCRIPTS[case]
    stderr = run(zygote, tmp_path, text)
    files = [each for each in stderr.splitlines() if each.lstrip().startswith("File ")]
    assert all(f'"{tmp_path}/train.py"' in each for each in files), stderr
    assert line in stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("heterotrain.errors.UsageError: ")
    assert words in last


def test_the_launcher_and_json_lines_show_the_same(tmp_path: Path) -> None:
    text, line, words = SCRIPTS["after init"]
    stderr = launched(tmp_path, text, HETEROTRAIN_LOG_FORMAT="json")
    (record,) = [found for each in stderr.splitlines() if "exception" in (found := json.loads(each))]
    assert words in record["event"]
    assert line in record["exception"]
    assert record["exception"].count("File ") == 1


def test_a_wrong_setting_of_the_launcher_is_shown_without_library_lines(tmp_path: Path) -> None:
    stderr = launched(tmp_path, "", HETEROTRAIN_LOG_FORMAT="xml")
    assert stderr.strip().splitlines()[-1].startswith("heterotrain.errors.UsageError: HETEROTRAIN_LOG_FORMAT must be")
    assert "logs.py" not in stderr
    assert "logs.py" in launched(tmp_path, "", "-X", "dev", HETEROTRAIN_LOG_FORMAT="xml")


def test_an_error_that_the_script_wraps_is_shown_in_full(zygote: Zygote, tmp_path: Path) -> None:
    caught = (
        "import heterotrain\n\ntry:\n    heterotrain.init(epochs=0)\n"
        "except heterotrain.UsageError as error:\n    raise ValueError('mine') from error\n"
    )
    assert "admission.py" in run(zygote, tmp_path, caught)
