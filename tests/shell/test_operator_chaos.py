"""Fault scenarios for the operator, from seeds: ``make chaos`` plays many more of them (see ``support.chaos``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from heterotrain_operator.decide import inputs
from heterotrain_operator.decide.workers import failures
from support.chaos.faults import EFFECTS, Fault
from support.chaos.history import Verdict, play
from support.repeat import first_seed, times

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.heavy
def test_jobs_survive_what_goes_wrong_around_the_operator() -> None:
    """In a process of its own, because the order of sets is part of a history. The gate's have 20 of 26 faults."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    histories, seed = times(gate=6, every=300), first_seed(gate=108)
    asked = ["--histories", str(histories), "--seed", str(seed), "--processes", "1"]
    found = subprocess.run(
        [sys.executable, "-m", "support.chaos", *asked], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.fixture(autouse=True)
def _quiet() -> None:
    structlog.configure(processors=[_drop])


def _drop(*_: object) -> None:
    raise structlog.DropEvent


def quiet_history(*faults: Fault, seed: int = 3) -> Verdict:
    return play(seed, faults)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", sorted(EFFECTS))
def test_each_fault_alone_does_no_harm(kind: str) -> None:
    verdict = quiet_history(Fault(at_s=40.0, kind=kind, lasts_s=30.0, choice=7))
    assert not verdict.problems, verdict


def test_an_api_server_that_is_slow_for_minutes_keeps_the_leader() -> None:
    verdict = quiet_history(Fault(at_s=20.0, kind="API server 5 s slow", lasts_s=300.0, choice=0))
    assert not verdict.problems, verdict
    assert verdict.notes["ends"] == {"first": {}, "second": {}}


def test_a_loss_that_is_never_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge would notice: here the operator looks at no pod that is gone."""
    original = failures.account

    def blind(status: object, workers: object, plan: object, **rest: object) -> object:
        return original(status, workers, None, **{**rest, "departed": ()})  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(inputs, "account", blind)
    verdict = quiet_history(Fault(at_s=60.0, kind="pod deleted by force", lasts_s=0.0, choice=1))
    assert any("members were lost" in problem for problem in verdict.problems), verdict
