"""Workers for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.harness import Operator, Zygote
from heterotrain_core.contract.config import TrainingConfig


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks workers."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def operate(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    """Make an operator; configuration fields are given by name."""
    made: list[Operator] = []

    def make(*, batch_samples: int = 16, **config: Any) -> Operator:
        settings = {"epochs": 2, "peer_timeout_s": 3.0, "base_batch_samples": batch_samples, "bucket_mib": 0.001}
        operator = Operator(zygote, tmp_path, TrainingConfig(**(settings | config)), batch_samples=batch_samples)
        made.append(operator)
        return operator

    yield make
    for operator in made:
        operator.close()
