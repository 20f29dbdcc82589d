"""What people reported of DistributedDataParallel: each script trains as one process does, or gets one sentence.

``ROWS`` has each report, what comes of it here, and the test that shows it, in this file or in another.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.further_reports import Array, plain_apart, sets_of
from distributed.harness import Gate, Operator, assert_same_weights, check_weights
from distributed.own_ranks import OwnRanks
from distributed.report_scripts import plain, report_of
from support.syntax import parsed

Operate = Callable[..., Operator]
SCRIPT = "distributed.report_scripts:train"
APART = "distributed.further_reports:apart"
GATE = ("Encodings", "NumpySchedule", "QuantizedOptimizer", "ExtraState", "HiddenStates", "Evaluated")
THOROUGH = (
    "Surgery", "ScheduleFreeOptimizer", "Packed", "Weighted", "Contents", "FrozenInt8", "Scalar", "Uint16", "OneCycle",
    "FrozenTower",
)  # fmt: skip
FURTHER = ("Parametrized", "LoadsLate", "RangeTest", "Adafactor", "Inner", "Compiled", "Copied")
"""What no report names."""
EQUAL, ONE_SENTENCE = "equal", "one sentence"
TWIN, SENTENCE = "test_a_script_trains_as_one_process_does", "test_a_script_gets_one_sentence"
FORWARD = "test_forward_state.py::test_state_that_changes_in_forward_is_that_of_one_process"
DATA = "test_same_data.py::test_different_data_are_one_error_on_all_ranks"
FINISH = "test_finish.py::test_one_rank_ends_the_training_of_all"
DENOMINATORS = "test_step_api.py::test_two_denominators_are_those_of_the_global_batch"
UNIT = "../unit/trainer/"
ROWS = {
    1: ("hundreds of tensors go to loader processes", EQUAL, "test_many_tensors_go_to_loader_processes"),
    2: ("loader processes share a large array", EQUAL, "test_loader_processes_share_a_large_array"),
    3: ("little shared memory", EQUAL, f"{UNIT}data/test_shared_copy.py::test_values_and_formats_stay"),
    4: (
        "SIGTERM to all processes of a group", EQUAL,
        "test_stop_signals.py::test_signals_to_the_process_group_leave_loader_processes_alone",
    ),
    5: ("observers of quantization", EQUAL, FORWARD),
    6: ("codebooks by moving sums", EQUAL, FORWARD),
    7: ("spectral norm", EQUAL, FORWARD),
    8: ("momentum encoder and queue", EQUAL, FORWARD),
    9: ("files in another order, or missing, on one rank", ONE_SENTENCE, DATA),
    10: ("a data set that the script divides", ONE_SENTENCE, DATA),
    11: ("one rank stops early", EQUAL, FINISH),
    12: ("all ranks stop in a hook", EQUAL, FINISH),
    13: ("a second loop with other data", EQUAL, "test_phases.py::test_a_loss_and_a_join_in_another_phase"),
    14: ("batches of a tokenizer", EQUAL, f"{TWIN}[Encodings]"),
    15: ("packed sequences, dataclasses", EQUAL, f"{TWIN}[Packed]"),
    16: ("two losses with means of their own", EQUAL, DENOMINATORS),
    17: ("gradient surgery", EQUAL, f"{TWIN}[Surgery]"),
    18: ("LBFGS", ONE_SENTENCE, "test_ordinary_loops.py::test_a_habit_that_cannot_work_ends_with_its_sentence"),
    19: ("complex parameters", ONE_SENTENCE, f"{SENTENCE}[ComplexParameter]"),
    20: ("sparse gradients", ONE_SENTENCE, f"{SENTENCE}[SparseFunction]"),
    21: ("complex buffers", EQUAL, f"{TWIN}[Contents]"),
    22: ("frozen integers, scalars, other formats", EQUAL, f"{TWIN}[FrozenInt8]"),
    23: ("sparse buffers", ONE_SENTENCE, f"{SENTENCE}[SparseBuffer]"),
    24: ("extra state in a BytesIO", EQUAL, f"{TWIN}[ExtraState]"),
    25: (
        "a compiled model's checkpoint", EQUAL,
        f"{UNIT}state/test_compiled_names.py::test_names_of_compiled_models_are_those_of_the_model",
    ),
    26: ("schedule-free optimizers", EQUAL, f"{TWIN}[ScheduleFreeOptimizer]"),
    27: ("numpy's numbers in states", EQUAL, f"{TWIN}[NumpySchedule]"),
    28: ("schedulers of PyTorch", EQUAL, f"{TWIN}[OneCycle]"),
    29: ("state of optimizers in lists", EQUAL, f"{TWIN}[QuantizedOptimizer]"),
    30: ("state of optimizers in 8 bits, or in attributes", ONE_SENTENCE, "test_what_a_joiner_lacks_is_named"),
    31: ("hooks on gradients", EQUAL, FORWARD),
    32: ("optimizers that step in backward", ONE_SENTENCE, f"{SENTENCE}[InBackward]"),
    33: (
        "bad samples are dropped", EQUAL,
        f"{UNIT}steps/test_lists_of_micro_batches.py::test_micro_batches_are_left_out",
    ),
    34: ("weighted samplers", EQUAL, f"{TWIN}[Weighted]"),
    35: ("hidden states from batch to batch", EQUAL, f"{TWIN}[HiddenStates]"),
    36: ("torch.set_default_device", ONE_SENTENCE, f"{SENTENCE}[DefaultDevice]"),
    37: ("one rank prepares the data", EQUAL, "test_one_process_downloads_for_all"),
    38: ("one bad sample", ONE_SENTENCE, f"{SENTENCE}[BadSample]"),
    39: ("evaluations of streams and DataLoaders", EQUAL, f"{TWIN}[Evaluated]"),
    40: ("one sample, folds, threads", EQUAL, "test_trainings_that_are_small_or_follow_each_other"),
    41: ("a state without the frozen part", EQUAL, f"{TWIN}[FrozenTower]"),
    42: (
        "a rank that answers nothing for long", EQUAL,
        "test_membership.py::test_a_frozen_worker_is_excluded_and_fenced_when_it_resumes",
    ),
    43: (
        "a data set that has grown since", ONE_SENTENCE,
        f"{UNIT}checkpoints/test_resumed_order.py::test_another_order_is_refused_in_the_middle_of_an_epoch",
    ),
}  # fmt: skip
"""By number: what people do, what comes of it, and the test."""
SENTENCES = {
    "SparseLayer": "with sparse gradients: leave out sparse=True",
    "SparseFunction": "a parameter has a sparse gradient: leave out sparse=True",
    "MaxNorm": "limit the rows after step.apply",
    "SparseBuffer": "buffer 'adjacency' is sparse or nested",
    "ComplexParameter": "store real and imaginary parts as real numbers",
    "InBackward": "call step.apply(optimizer) in place of optimizer.step()",
    "BadSample": "heterotrain: this is sample 40 of Poison",
    "DefaultDevice": "torch.set_default_device('meta') is in force: leave it out",
    "Barrier": "heterotrain: leave out DistributedDataParallel, which job.wrap takes the place of",
}


@pytest.mark.parametrize("row", ROWS)
def test_every_report_has_a_test(row: int) -> None:
    _, _, test = ROWS[row]
    file, _, name = test.rpartition("::")
    name, _, case = name.removesuffix("]").partition("[")
    path = Path(__file__).parent / (file or Path(__file__).name)
    assert name in {each.name for each in parsed(path.read_text()).body if isinstance(each, ast.FunctionDef)}, path
    assert not case or case in {*GATE, *THOROUGH, *SENTENCES}
    assert row < 2 or row - 1 in ROWS


@pytest.mark.parametrize(
    "name", [*GATE, *(pytest.param(each, marks=pytest.mark.thorough) for each in (*THOROUGH, *FURTHER))]
)
def test_a_script_trains_as_one_process_does(operate: Operate, name: str) -> None:
    """On uneven ranks with micro-batches, through a join, after which one rank has no samples."""
    operator = operate()
    gate = Gate(operator.folder, 5)
    workers = operator.start_workers(2, faults={0: gate.fault}, script=SCRIPT, report=name)
    cut = 4 * report_of(name).is_cut
    operator.plan(workers, shares=(11, 5), micro=(cut, 0))
    workers.append(operator.start_ready("w2", script=SCRIPT, report=name))
    operator.until(gate.reached, "the training is under way")
    operator.plan(workers, shares=(0, 9, 7), micro=(0, cut, 0))
    operator.until_read(workers[:2])
    gate.open()
    check_weights(operator, workers, plain(name))


@pytest.mark.thorough
def test_many_tensors_go_to_loader_processes(own_ranks: OwnRanks, tmp_path: Path) -> None:
    """768 of them, where a process start takes 256 descriptors."""
    (alone,) = own_ranks.start(SCRIPT, out=str(tmp_path), report="ListOfTensors", workers=2)
    assert alone.ended() == 0, alone.log()
    assert_same_weights(dict(torch.load(tmp_path / "alone.pt")), plain("ListOfTensors"))


@pytest.mark.thorough
def test_loader_processes_share_a_large_array(own_ranks: OwnRanks, tmp_path: Path) -> None:
    """None of them has memory of its own for the array."""
    (alone,) = own_ranks.start(SCRIPT, out=str(tmp_path), report="LargeArray", workers=2)
    assert alone.ended() == 0, alone.log()
    own = [int(path.read_text()) << 10 for path in tmp_path.glob("own-*")]
    assert len(own) >= 2
    assert max(own) < Array.BYTES, own  # what a loader imports is up to 180 MB, and a copy would come on top
    assert_same_weights(dict(torch.load(tmp_path / "alone.pt")), plain("LargeArray"))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["one", "folds", "thread"])
def test_trainings_that_are_small_or_follow_each_other(own_ranks: OwnRanks, tmp_path: Path, kind: str) -> None:
    """Alone and on two ranks."""
    for world_size in (0, 2):
        started = own_ranks.start(APART, world_size=world_size, out=str(tmp_path), kind=kind)
        assert [rank.ended() for rank in started] == [0] * len(started), started[-1].log()
    for name, data in sets_of(kind).items():
        for rank in ("alone", 0, 1):
            assert_same_weights(dict(torch.load(tmp_path / f"{name}-{rank}.pt")), plain_apart(data))


@pytest.mark.thorough
def test_one_process_downloads_for_all(own_ranks: OwnRanks, tmp_path: Path) -> None:
    started = own_ranks.start("distributed.further_reports:download_once", world_size=3, out=str(tmp_path))
    assert [rank.ended() for rank in started] == [0] * 3, started[0].log()
    assert (tmp_path / "downloads").read_text() == "one\n"


@pytest.mark.thorough
def test_what_a_joiner_lacks_is_named(operate: Operate) -> None:
    """A count in an attribute of the optimizer: the copies differ, and the first sentence says why."""
    operator = operate(epochs=8)
    gate = Gate(operator.folder, 5)
    counts = {"script": SCRIPT, "report": "CountsInAnAttribute"}
    workers = operator.start_workers(2, faults={0: gate.fault}, **counts)
    operator.plan(workers)
    workers.append(operator.start_ready("w2", **counts))
    operator.until(gate.reached, "the training is under way")
    operator.plan(workers)
    gate.open()
    operator.finish(workers)
    for worker in workers:
        assert worker.code == 1, worker.log()
        assert "Probably something is missing on rank 2, which took the state over after step" in worker.log()


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
