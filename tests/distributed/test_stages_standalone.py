"""Pipeline members, without a job: gradients and weights are those of one process, however the model is cut."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed.harness import LIMIT_S, START_S, Worker, Zygote
from support.ports import free_port
from support.repeat import part_of
from support.waiting import wait_until

MEMBERS: list[dict[str, Any]] = [
    {"cuts": [0, 4, 6], "sizes": [2] * 6}, {"cuts": [0, 1, 6], "sizes": [2, 1]}, {"cuts": [], "sizes": [3]},
]  # fmt: skip
CASES = [(kind, cuts) for cuts in ([0, 1, 5, 6], [0, 2, 3, 6], [0, 5, 6]) for kind in ("decoder", "rotated")]


def run(zygote: Zygote, folder: Path, ranks: int, **arguments: Any) -> list[Worker]:
    """Run one process for each rank to its end."""
    port, workers = free_port(), []
    for rank in range(ranks):
        home = folder / f"rank-{rank}"
        home.mkdir()
        inbox = zygote.start(str(home), {
            "environ": {}, "output": str(home / "output"), "script": "distributed.stage_scripts:steps",
            "arguments": {"out": str(folder), "port": port, "rank": rank} | arguments,
        })  # fmt: skip
        pid = inbox.get(timeout=START_S)["pid"]
        workers.append(
            Worker(name=f"{rank}", uid=f"{rank}", folder=home, peer_port=0, metrics_port=0, inbox=inbox, pid=pid)
        )
    for worker in workers:
        wait_until(lambda worker=worker: worker.poll() is not None, "it ends", timeout_s=LIMIT_S, evidence=worker.log)  # type: ignore[misc]  # a default argument binds the loop's variable
    return workers


@pytest.mark.parametrize("kind", ["decoder", "rotated", "layers"])
def test_two_cuts_and_a_whole_model_train_like_one_process(zygote: Zygote, tmp_path: Path, kind: str) -> None:
    """Six, two and one micro-batches, dropout, weights by letters, clipping, and a tied embedding."""
    workers = run(zygote, tmp_path, 5, kind=kind, blocks=4, members=MEMBERS)
    assert all(worker.code == 0 for worker in workers), "\n".join(worker.log()[-3000:] for worker in workers)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(5)]
    for result in results:
        assert result["error"] < 1e-10
        assert abs(result["norm"]) < 1e-10
    assert all(len(one["held"]) + len(two["held"]) == one["all"] + 1 for one, two in (results[:2], results[2:4]))


@pytest.mark.parametrize(("kind", "cuts"), part_of(CASES, of=3))
def test_stages_in_the_middle_and_fewer_micro_batches_than_stages(
    zygote: Zygote, tmp_path: Path, cuts: list[int], kind: str
) -> None:
    workers = run(zygote, tmp_path, len(cuts) - 1, kind=kind, blocks=4, members=[{"cuts": cuts, "sizes": [3, 2]}])
    assert all(worker.code == 0 for worker in workers), "\n".join(worker.log()[-3000:] for worker in workers)
    assert all(json.loads((tmp_path / f"{rank}.json").read_text())["error"] < 1e-10 for rank in range(len(cuts) - 1))


def test_stages_leave_a_pass_when_a_neighbour_dies(zygote: Zygote, tmp_path: Path) -> None:
    members = [{"cuts": [0, 2, 4, 6], "sizes": [2] * 5}]
    workers = run(zygote, tmp_path, 3, kind="decoder", blocks=4, members=members, lost=1)
    assert [worker.code for worker in workers] == [0, -signal.SIGKILL, 0], "\n".join(w.log()[-3000:] for w in workers)
    for rank in (0, 2):
        assert json.loads((tmp_path / f"{rank}.json").read_text())["step"] == 1
