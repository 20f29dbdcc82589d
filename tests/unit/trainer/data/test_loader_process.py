"""Loader processes: their start, dropped work, and their end with the rank, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import heterotrain
import pytest
from heterotrain.data.loader_process import Workers
from heterotrain.data.main_guard import runs_on_import
from heterotrain.data.prefetch import Prefetcher
from heterotrain.data.slices import EpochSlice
from heterotrain.data.sources import Mapped, source_of
from heterotrain.errors import UsageError
from support.gated_data import Gated, Opened, prepare
from support.waiting import wait_until
from support.zygote import Ended, Zygote

ROOT = Path(__file__).parents[4]
LIMIT_S = 120.0
LIMIT_OF_SCRIPT_S = 240.0
"""Longer than a test waits for the script on an idle machine."""


def test_work_for_earlier_shares_is_dropped_before_the_next_sample(tmp_path: Path) -> None:
    """A process that is in the middle of an outdated slice loads neither the rest of it nor the slices behind it."""
    source = source_of(Gated(tmp_path, gate=10), collate=None, shuffle=False, seed=0)
    prefetcher = Prefetcher(source, workers=Workers(count=1, prefetch_factor=4), pin=False)
    number = int(prefetcher._upcoming.number)

    def slices(start: int, size: int) -> Iterator[EpochSlice]:
        return (EpochSlice(0, begin, begin + size) for begin in range(start, 96, size))

    first = EpochSlice(0, 0, 8)
    prefetcher.take(first, lambda: slices(0, 8))
    wait_until((tmp_path / "begun-10").exists, "the next slice is being loaded", timeout_s=LIMIT_S)

    def open_gate() -> None:
        wait_until(lambda: int(prefetcher._upcoming.number) == number + 2, "the slices change", timeout_s=LIMIT_S)
        (tmp_path / "open").touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    batch = prefetcher.take(EpochSlice(0, 48, 53), lambda: iter([EpochSlice(0, 48, 53)]))
    opener.join()
    assert batch.tolist() == list(range(48, 53))
    begun = {int(path.name.removeprefix("begun-")) for path in tmp_path.glob("begun-*")}
    assert begun == {*range(11), *range(48, 53)}


def test_the_scripts_init_function_gets_the_scripts_data_set(tmp_path: Path) -> None:
    """It runs in each process before the first sample, with the process's number."""
    source = source_of(Opened(tmp_path, gate=-1), collate=None, shuffle=False, seed=0)
    prefetcher = Prefetcher(source, workers=Workers(count=2, init_fn=prepare), pin=False)
    parts = [EpochSlice(0, start, start + 2) for start in (0, 2, 4, 6)]
    found = [prefetcher.take(part, lambda: iter(parts)).tolist() for part in parts]
    assert found == [[1000, 1001], [2002, 2003], [1004, 1005], [2006, 2007]]


@pytest.mark.parametrize(("what", "fields"), [("collate", {"collate": lambda s: s}), ("worker_init_fn", {})])
def test_a_function_that_cannot_be_sent_is_named(tmp_path: Path, what: str, fields: dict[str, Any]) -> None:
    """Lambdas and local functions are refused in one sentence, before any process is started."""
    source = Mapped(**({"dataset": Gated(tmp_path, 0), "collate": None, "shuffle": True, "seed": 0} | fields))
    init = None if fields else lambda _worker: None
    with pytest.raises(UsageError, match=rf"^{what} cannot be sent .* top level of a module"):
        Prefetcher(source, workers=Workers(count=1, init_fn=init), pin=False)
    assert not list(tmp_path.iterdir())


SCRIPT = """
import faulthandler, multiprocessing, os, pathlib, signal, torch
import heterotrain
faulthandler.dump_traceback_later({limit_s}, exit=True)
{setup}
def main():
    job = {job}
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in job.steps(torch.utils.data.TensorDataset(torch.ones(64, 1)), workers=2):
        with step:
            for (x,) in step.micro_batches():
                step.backward(model(x).mean())
            step.apply(optimizer)
        {each_step}
{call}
"""


def run(
    zygote: Zygote, folder: Path, *, setup: str = "", job: str = "heterotrain.init()", each_step: str = "", call: str
) -> Ended:
    """Run a script with two loader processes, and return how it ended.

    After ``LIMIT_OF_SCRIPT_S`` it prints where it hangs, and ends.
    """
    path, limit_s = folder / "train.py", LIMIT_OF_SCRIPT_S
    path.write_text(SCRIPT.format(setup=setup, job=job, each_step=each_step or "pass", call=call, limit_s=limit_s))
    paths = f"{ROOT / 'core'}:{ROOT / 'trainer'}"
    # PYTHONFAULTHANDLER: so that a process that hangs can be asked where
    return zygote.run(
        folder, str(path), PYTHONPATH=paths, OMP_NUM_THREADS="1", FOLDER=str(folder), PYTHONFAULTHANDLER="1"
    )


def test_loader_processes_end_with_a_rank_that_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    """After SIGKILL of the rank neither its loader processes nor the server they were forked from live on."""
    listed = "(pathlib.Path(os.environ['FOLDER']) / 'pids').write_text(' '.join(map(str, pids)))"
    each_step = (
        "from multiprocessing.forkserver import _forkserver; "
        "pids = [each.pid for each in multiprocessing.active_children()] + [_forkserver._forkserver_pid]; "
        f"{listed}; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run(zygote, tmp_path, each_step=each_step, call='if __name__ == "__main__": main()')
    assert done.code == -9, done.text
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    for pid in pids:
        evidence = partial(where_it_hangs, pid, done)
        wait_until(partial(has_ended, pid), f"{pid} of {pids} ends", timeout_s=LIMIT_S / len(pids), evidence=evidence)


def has_ended(pid: int) -> bool:
    """Return whether a process does not exist, or only as an entry whose parent has not read it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def where_it_hangs(pid: int, done: Ended) -> str:
    """End a process and return the stacks that it prints."""
    os.kill(pid, signal.SIGABRT)
    wait_until(partial(has_ended, pid), "the process aborts", timeout_s=30.0)
    return done.text


@pytest.mark.parametrize(
    "script",
    [
        {"call": "main()"},  # found before any process is started
        {"setup": "early = heterotrain.init()", "job": "early", "call": 'if __name__ == "__main__": main()'},
    ],
)
def test_a_script_without_a_main_guard_gets_one_sentence(
    zygote: Zygote, tmp_path: Path, script: dict[str, str]
) -> None:
    """It ends at once, without a traceback of multiprocessing."""
    done = run(zygote, tmp_path, **script)
    assert done.code == 1
    assert 'has to start its training below `if __name__ == "__main__":`' in done.text
    assert "bootstrapping" not in done.text
    assert "/multiprocessing/" not in done.text


@pytest.mark.parametrize(
    ("script", "line", "expected"),
    [
        ("import torch\nmain()\n", 2, True),
        ("import torch\nif __name__ == '__main__':\n    main(\n)\n", 4, False),
        ("with open('x') as f:\n    main()\n", 2, True),
        ("def main():\n    pass\nfor _ in range(3):\n    main()\n", 4, True),
        ("match 1:\n    case 1:\n        main()\n", 3, False),
        ("\n\n", 2, False),
    ],
)
def test_statements_that_an_import_runs(script: str, line: int, expected: bool) -> None:
    """Only a condition keeps a top-level statement from being run once more."""
    assert runs_on_import(script, line) is expected


def test_init_is_refused_while_a_loader_process_imports_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each process would start a training of its own."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="has to start its training below"):
        heterotrain.init()
