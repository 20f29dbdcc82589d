"""What people reported of DistributedDataParallel: each script trains as one process does, or gets one sentence.

Reports that a test of its own covers are not here: state in forward (``test_forward_state``), data that differ
(``test_same_data``), signals (``test_stop_signals``), ends (``test_finish``), phases (``test_phases``), denominators
and dropped samples (``test_step_api``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from distributed.harness import Gate, Operator, Zygote, assert_same_weights
from distributed.own_ranks import OwnRanks
from distributed.report_scripts import plain

Operate = Callable[..., Operator]
SCRIPT = "distributed.report_scripts:train"
GATE = ("Encodings", "NumpySchedule", "QuantizedOptimizer", "ExtraState")
THOROUGH = (
    "Surgery", "ScheduleFreeOptimizer", "HiddenStates", "Evaluated",
    "Packed", "Weighted", "Contents", "FrozenInt8", "Scalar", "Uint16", "OneCycle", "FrozenTower",
)  # fmt: skip
SENTENCES = {
    "SparseLayer": "with sparse gradients: leave out sparse=True",
    "SparseFunction": "a parameter has a sparse gradient: leave out sparse=True",
    "MaxNorm": "limit the rows after step.apply",
    "SparseBuffer": "buffer 'adjacency' is sparse or nested",
    "ComplexParameter": "store real and imaginary parts as real numbers",
    "Lbfgs": "use an optimizer whose step() needs no closure",
    "InBackward": "call step.apply(optimizer) in place of optimizer.step()",
    "BadSample": "heterotrain: this is sample 40 of Poison",
    "Loader": "job.steps takes the data set itself, not a DataLoader",
    "DefaultDevice": "torch.set_default_device('meta') is in force: leave it out",
    "Barrier": "heterotrain: leave out DistributedDataParallel, which job.wrap takes the place of",
}


@pytest.fixture
def own_ranks(zygote: Zygote, tmp_path: Path) -> Iterator[OwnRanks]:
    """Yield what starts the ranks."""
    ranks = OwnRanks(zygote, tmp_path)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", [*GATE, *(pytest.param(each, marks=pytest.mark.thorough) for each in THOROUGH)])
def test_a_script_trains_as_one_process_does(operate: Operate, name: str) -> None:
    """On uneven ranks with micro-batches, through a join, after which one rank has no samples."""
    operator = operate()
    gate = Gate(operator.folder, 5)
    workers = [operator.start("w0", script=SCRIPT, report=name, fault=gate.fault)]
    workers.append(operator.start("w1", script=SCRIPT, report=name))
    operator.until_ready(*workers)
    operator.plan(workers, shares=(11, 5), micro=(4, 0))
    workers.append(operator.start("w2", script=SCRIPT, report=name))
    operator.until_ready(workers[-1])
    operator.until(gate.reached, "the training is under way")
    operator.plan(workers, shares=(0, 9, 7), micro=(0, 4, 0))
    operator.until(lambda: all(f"plan {operator.generation}." in w.log() for w in workers[:2]), "the plan is read")
    gate.open()
    operator.finish(workers)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert_same_weights(operator.weights(worker), plain(name))


@pytest.mark.thorough
def test_many_tensors_go_to_loader_processes(own_ranks: OwnRanks, tmp_path: Path) -> None:
    """768 of them, where a process start takes 256 descriptors."""
    (alone,) = own_ranks.start(SCRIPT, out=str(tmp_path), report="ListOfTensors", workers=2)
    assert alone.ended() == 0, alone.log()
    assert_same_weights(dict(torch.load(tmp_path / "alone.pt")), plain("ListOfTensors"))


@pytest.mark.parametrize("name", SENTENCES)
def test_a_script_gets_one_sentence(own_ranks: OwnRanks, tmp_path: Path, name: str) -> None:
    (alone,) = own_ranks.start(SCRIPT, out=str(tmp_path), report=name)
    assert alone.ended() == 1
    assert SENTENCES[name] in alone.log()


def test_ranks_with_other_settings_are_named(own_ranks: OwnRanks, tmp_path: Path) -> None:
    started = own_ranks.start(SCRIPT, world_size=2, out=str(tmp_path), report="OtherSettings")
    assert [rank.ended() for rank in started] == [1, 1]
    said = "batch_samples is 17 on rank 1 and 16 on rank 0: give every rank the same"
    assert all(said in rank.log() for rank in started)


def test_the_last_line_of_every_rank_is_the_error_of_the_script(own_ranks: OwnRanks, tmp_path: Path) -> None:
    started = own_ranks.start(SCRIPT, world_size=2, out=str(tmp_path), report="OneFails")
    assert [rank.ended() for rank in started] == [1, 1]
    for rank in started:
        assert rank.log().strip().splitlines()[-1].endswith("ValueError: a mistake of the script"), rank.log()
