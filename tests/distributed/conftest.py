"""Workers for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.harness import Operator, Zygote
from distributed.own_ranks import OwnRanks
from heterotrain_core.contract.config import TrainingConfig
from support import patience


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow for several waits of ``LIMIT_S`` each, so that a failure comes with what the workers printed."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """Count the waits of this process and its workers apart from the machine's other work."""
    with patience.share():
        yield


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Yield the process that forks workers."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def own_ranks(zygote: Zygote, tmp_path: Path) -> Iterator[OwnRanks]:
    """Yield what starts ranks without an operator."""
    ranks = OwnRanks(zygote, tmp_path)
    yield ranks
    ranks.close()


@pytest.fixture
def operate(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    """Yield a function that creates an operator; its keyword arguments are fields of the configuration."""
    operators: list[Operator] = []

    def make(*, batch_samples: int = 16, **config: Any) -> Operator:
        settings = {"epochs": 2, "peer_timeout_s": 3.0, "base_batch_samples": batch_samples, "bucket_mib": 0.001}
        operator = Operator(zygote, tmp_path, TrainingConfig(**(settings | config)), batch_samples=batch_samples)
        operators.append(operator)
        return operator

    yield make
    for operator in operators:
        operator.close()
