"""The first line of `make cluster` and `make demo` names what is left to do, and a time that fits it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab.cluster import REPOSITORY
from local_cluster import paths, toolchain
from local_cluster.outlook import PROBLEM, WEIGHTS, Outlook

ALL = [program.name for program in toolchain.PROGRAMS]
LINES = {
    "==> make demo: install Python packages, compile the cluster's programs, as no host of their releases answers, "
    "build images, start the cluster, run the demo: about 16 min on 2 processors": Outlook(
        target="demo", cores=2, silent=True, compiled=ALL
    ),
    "==> make demo: install Python packages, download 512 MB of programs, build images, start the cluster, run the "
    "demo: about 8 min on 2 processors beside the download": Outlook(
        target="demo", cores=2, download_bytes=512_000_000, compiled=["pause"]
    ),
    "==> make cluster: compile kubernetes: about 10 min on 1 processor": Outlook(
        target="cluster", cores=1, has_packages=True, compiled=["kubernetes"], has_images=True, is_running=True
    ),
    "==> make cluster: start the cluster: about 20 s on 8 processors": Outlook(
        target="cluster", cores=8, has_packages=True, has_images=True
    ),
    "==> make demo: run the demo: about 4 min on 2 processors": Outlook(
        target="demo", cores=2, has_packages=True, has_images=True, is_running=True
    ),
    "==> make cluster: everything is there": Outlook(
        target="cluster", cores=2, has_packages=True, has_images=True, is_running=True
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_names_what_is_left(line: str) -> None:
    assert LINES[line].line() == line


def test_every_program_that_takes_long_has_a_weight() -> None:
    assert sum(WEIGHTS.values()) == pytest.approx(1)
    assert {*WEIGHTS} | {"pause", "containerd-shim-runc-v2", "ctr"} == {*ALL}


def outlook(cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return what `make` prints first on a machine with an empty cache."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        ["make", "--no-print-directory", "outlook", f"PYTHON={sys.executable}", f"VENV={cache}"],
        env={"PATH": path, "HOME": os.environ["HOME"], "HETEROTRAIN_CACHE": str(cache), **variables},
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        check=False,
    )


def test_nothing_but_python_is_needed(tmp_path: Path) -> None:
    """It is printed before packages are installed: an isolated interpreter sees none."""
    program = (
        f"import runpy, sys; sys.argv[1:] = ['demo', '.']; sys.path.insert(0, {str(paths.LOCAL)!r}); "
        "runpy.run_module('local_cluster.outlook', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PATH": "/nowhere", "HETEROTRAIN_CACHE": str(tmp_path), "BINARIES": "compile"},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"==> make demo: install Python packages, compile kubernetes, .* processors?\n", done.stdout)


def test_a_mistake_in_the_choice_ends_make_at_once(tmp_path: Path) -> None:
    right, wrong = outlook(tmp_path, BINARIES="compile"), outlook(tmp_path, BINARIES="compiled")
    assert (right.returncode, right.stdout.count("\n")) == (0, 1)
    assert wrong.returncode != 0
    assert wrong.stdout == "problem: BINARIES is 'compiled', but it can be download, compile, or nothing for either\n"
    assert PROBLEM not in (0, 1, 2), "what Python itself ends with"


def test_a_python_that_cannot_run_it_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "outlook", f"PYTHON={tmp_path}/python"],
        cwd=REPOSITORY, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
