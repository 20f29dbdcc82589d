"""The record for repeating a run, and data that differ from those at the start of training."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from heterotrain.checkpoints.record import KEPT_PLANS, RunRecord, fingerprint
from heterotrain.data.progress import Progress
from heterotrain.data.sources import source_of
from heterotrain.identity import Identity, Mode
from heterotrain.membership.roster import FormationId, Roster, roster_of
from heterotrain.state.tensors import flatten, unflatten
from heterotrain_core.contract.config import TrainingConfig
from support.plans import plan_of


def a_record(data: str | None = None) -> RunRecord:
    """Return a record with a fingerprint."""
    record = RunRecord(Identity(mode=Mode.ALONE), TrainingConfig(seed=7, epochs=3))
    record.data = data
    return record


def a_roster(revision: int, shares: tuple[int, ...], *, lost: int = 0) -> Roster:
    """Return the roster of a plan, after the loss of its last members."""
    plan = plan_of(shares, generation=2, revision=revision)
    ranks = tuple(range(len(shares) - lost))
    return roster_of(plan, plan_ranks=ranks, formation=FormationId(generation=2, number=lost))


def test_the_history_of_plans() -> None:
    """One entry for each plan or formation, from its first committed step; it survives a checkpoint."""
    record = a_record()
    record.note(a_roster(1, (8, 8, 4)), step=0)
    record.note(a_roster(1, (8, 8, 4)), step=1)
    record.note(a_roster(2, (10, 6, 4)), step=5)
    after = a_record()
    after.load_state_dict(unflatten(flatten(record.state_dict())))
    after.note(a_roster(2, (10, 6, 4)), step=6)
    after.note(a_roster(2, (10, 6, 4), lost=1), step=9)
    content = json.loads(after.file(Progress(steps=10)))
    assert [(p["from_step"], p["revision"], p["formation"], sum(p["shares"])) for p in content["plans"]] == [
        (0, 1, 0, 20),
        (5, 2, 0, 20),
        (9, 2, 1, 20),
    ]
    assert content["plans"][1]["shares"] == [10, 6, 4]
    assert content["plans"][2]["workers"] == ["w0/0", "w1/0"]
    assert (content["seed"], content["settings"]["epochs"], content["progress"]["steps"]) == (7, 3, 10)
    assert content["versions"]["torch"] == torch.__version__


def test_a_long_history_is_cut_and_records_that() -> None:
    """The state must not grow without limit."""
    record = a_record()
    for revision in range(KEPT_PLANS + 3):
        record.note(a_roster(revision, (4,)), step=revision)
    content = json.loads(record.file(Progress()))
    assert content["plans_left_out"] == 3
    assert content["plans"][0]["from_step"] == 3


def test_other_data_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """On a rank that resumes or joins with them."""
    caplog.set_level(logging.WARNING)
    begun = a_record("a" * 64).state_dict()
    a_record("a" * 64).load_state_dict(begun)
    a_record(None).load_state_dict(begun)
    assert not caplog.records
    a_record("b" * 64).load_state_dict(begun)
    assert "not the one that training started with" in caplog.text


def of(data: Any) -> str | None:
    """Return the fingerprint of a list of samples."""
    return fingerprint(source_of(data, collate=lambda samples: samples[0], shuffle=True, seed=0))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {**s, "label": 4},
        lambda s: {**s, "text": "b"},
        lambda s: {**s, "x": s["x"] * 1.01},
        lambda s: {**s, "x": s["x"].double()},
        lambda s: {**s, "n": s["n"][::-1].copy()},
        lambda s: {"label": s["label"]},
    ],
    ids=["label", "text", "values", "dtype", "order", "keys"],
)
def test_a_fingerprint_detects_relevant_changes(change: Any) -> None:
    """Another value, type or order within a sample, but not the last digits of computed values."""
    sample = {"x": torch.linspace(0, 1, 9), "n": np.arange(5), "text": "a", "label": 3, "none": None}
    begun = of([sample] * 20)
    assert begun == of([{**sample, "x": sample["x"] + 1e-8}] * 20)
    assert begun != of([change(sample)] * 20)
    assert begun != of([sample] * 21)


def test_streams_have_no_fingerprint() -> None:
    """Looking at their samples would mean reading them."""
    assert of({1, 2, 3}) is None
