"""Whatever the shares, the weights are those of one process that trains on the global batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed.harness import Operator, assert_same_weights, reference
from heterotrain.sample_log import lineage
from heterotrain_core.contract.outcome import Ending


@pytest.mark.parametrize(
    ("shares", "micro"),
    [
        ((8, 4, 4), (0, 0, 0)),
        ((11, 5, 0), (0, 0, 0)),
        ((9, 6, 1), (2, 4, 1)),
    ],
    ids=["uneven", "zero-share", "accumulation"],
)
def test_uneven_shares_train_like_one_process(
    operate: Callable[..., Operator], shares: tuple[int, ...], micro: tuple[int, ...]
) -> None:
    """Uneven, empty and accumulated shares, with a short last step in each epoch."""
    operator = operate()
    workers = [operator.start(f"w{i}", samples=90) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=shares, micro=micro)
    operator.finish(workers)
    expected, ids = reference(epochs=2, samples=90)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert worker.outcome is not None
        assert worker.outcome.ending is Ending.FINISHED
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


def test_token_weights_train_like_one_process(operate: Callable[..., Operator]) -> None:
    """Sums with weights that are known only in backward, among them zero, on ranks with different totals."""
    operator = operate()
    workers = [operator.start(f"w{i}", tokens=True) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(13, 3), micro=(3, 2))
    operator.finish(workers)
    expected, _ = reference(epochs=2, tokens=True)
    for worker in workers:
        assert_same_weights(operator.weights(worker), expected)
