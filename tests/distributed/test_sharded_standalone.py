"""Members sharded with ``fully_shard``, without a job: exact, whoever holds what, also after an interrupted pass."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed.harness import LIMIT_S, START_S, Worker, Zygote
from heterotrain.state.ranges import TensorRange, missing, pieces_of
from support.ports import free_port
from support.repeat import part_of
from support.waiting import wait_until

SMALL = {"width": 5, "blocks": 3, "tied": False, "frozen": False}
OPTIONS: list[dict[str, Any]] = [
    {}, {"keep_gathered": True}, {"offload": True}, {"checkpoint_units": True},
    {"checkpoint_units": True, "keep_gathered": True},
]  # fmt: skip
CASES = [(members, seed) for seed in (0, 1) for members in ([2, 1], [2, 2], [3, 1], [4])]


def start(zygote: Zygote, folder: Path, script: str, ranks: int, **arguments: Any) -> list[Worker]:
    """Start one process for each rank."""
    port, workers = free_port(), []
    for rank in range(ranks):
        home = folder / f"rank-{rank}"
        home.mkdir()
        inbox = zygote.start(str(home), {
            "environ": {}, "output": str(home / "output"), "script": f"distributed.sharded_scripts:{script}",
            "arguments": {"out": str(folder), "port": port, "rank": rank} | arguments,
        })  # fmt: skip
        pid = inbox.get(timeout=START_S)["pid"]
        workers.append(
            Worker(name=f"{rank}", uid=f"{rank}", folder=home, peer_port=0, metrics_port=0, inbox=inbox, pid=pid)
        )
    return workers


def finish(workers: list[Worker]) -> None:
    """Wait until all have ended well."""
    for worker in workers:
        wait_until(lambda worker=worker: worker.poll() is not None, "it ends", timeout_s=LIMIT_S, evidence=worker.log)  # type: ignore[misc]  # a default argument binds the loop's variable
    assert all(worker.code == 0 for worker in workers), "\n".join(worker.log()[-3000:] for worker in workers)


def cuts_of(rng: random.Random, members: list[int]) -> list[list[list[int]]]:
    """Draw each rank's samples: an uneven share for each member, as many micro-batches on each of its ranks."""
    found, position = [], 0
    for ranks in members:
        micro_batches = rng.randint(1, 3)
        for _ in range(ranks):
            own = []
            for _ in range(micro_batches):
                size = rng.randint(0, 4) if found else rng.randint(1, 4)
                own.append([position, position + size])
                position += size
            found.append(own)
    for own in found:  # a spare sample has to exist
        for piece in own:
            piece[0], piece[1] = piece if piece[1] > piece[0] else [0, 0]
    return found


def check(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the results after checking that they agree with one process and hold the model together."""
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for result in results:
        assert result["error"] < 1e-10, result["error"]
    return results


@pytest.mark.parametrize(("members", "seed"), part_of(CASES, of=3))
def test_gradients_weights_and_moments_are_those_of_one_process(
    zygote: Zygote, tmp_path: Path, members: list[int], seed: int
) -> None:
    rng = random.Random(f"{members} {seed}")  # noqa: S311  # seeded chance
    model = {
        "width": rng.choice([4, 5, 7]), "blocks": rng.randint(2, 3), "tied": rng.random() < 0.5,
        "frozen": rng.random() < 0.5,
    }  # fmt: skip
    finish(start(
        zygote, tmp_path, "steps", sum(members), members=members, cuts=cuts_of(rng, members), model=model,
        options=rng.choice(OPTIONS),
    ))  # fmt: skip
    results = check(tmp_path, sum(members))
    sizes = results[0]["sizes"]
    holdings = [{name: TensorRange(name, *pair) for name, pair in result["holding"].items()} for result in results]
    first = 0
    for ranks in members:
        own = holdings[first : first + ranks]
        assert missing(sizes, own) == {}
        if ranks > 1:  # the state is really divided: nobody holds much more than its part
            held = max(sum(extent.elements for extent in holding.values()) for holding in own)
            assert held <= sum(sizes.values()) * (1 / ranks + 0.25)
        first += ranks
    assert all(piece.owners for piece in pieces_of(sizes, holdings))


@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_leaves_the_gradient_as_it_is(zygote: Zygote, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each unit's gradient is added up over the member in each micro-batch: no rank holds an undivided gradient."""
    rng = random.Random(str(options))  # noqa: S311  # seeded chance
    members, steps = [2, 1], 3
    cuts = cuts_of(rng, members)
    finish(start(
        zygote, tmp_path, "steps", 3, members=members, cuts=cuts, model=SMALL, options=options, backward=steps
    ))  # fmt: skip
    divided = SMALL["blocks"] + 1  # and what is around the blocks
    expected = [steps * len(cuts[0]) * divided] * 2 + [0]
    assert [result["reductions"] for result in check(tmp_path, 3)] == expected


@pytest.mark.parametrize("operation", part_of([1, 2, 4, 5, 7, 9, 11, 12, 14, 16], of=3))
def test_a_pass_left_at_any_operation_is_repeated_exactly(zygote: Zygote, tmp_path: Path, operation: int) -> None:
    rng = random.Random(operation)  # noqa: S311  # seeded chance
    members, cuts = [2], [[[0, 3], [3, 5]], [[5, 6], [6, 10]]]
    finish(start(
        zygote, tmp_path, "steps", 2, members=members, cuts=cuts, model=SMALL, options=rng.choice(OPTIONS),
        interrupt={"rank": operation % 2, "operation": operation},
    ))  # fmt: skip
    check(tmp_path, 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_rank_leaves_an_operation_when_one_is_lost(
    zygote: Zygote, tmp_path: Path, how: signal.Signals
) -> None:
    if how is signal.SIGSTOP:  # nothing shows its loss until somebody cuts, as heartbeats do
        (tmp_path / "cut").touch()
    first, second = start(zygote, tmp_path, "lost", 2)
    wait_until((tmp_path / "ready").exists, "both have connected", timeout_s=LIMIT_S, evidence=second.log)
    second.signal(how)
    if how is signal.SIGKILL:
        wait_until(lambda: second.poll() is not None, "it ends", timeout_s=LIMIT_S, evidence=second.log)
    (tmp_path / "gone").touch()
    wait_until((tmp_path / "result").exists, "the other leaves", timeout_s=LIMIT_S, evidence=first.log)
    assert (tmp_path / "result").read_text().startswith("PeerLost"), (tmp_path / "result").read_text()
    second.signal(signal.SIGKILL)
