"""Means over a data set, from sums over the ranks' parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.evaluation import means, measured, part_of, rows_of, sums
from torch.utils.data import DataLoader


def test_means_are_weighted_by_samples() -> None:
    found = sums([(3, {"loss": 1.0}), (1, {"loss": 5.0})])
    assert found == {"": 4.0, "loss": 8.0}
    assert means(None, found) == {"loss": 2.0}


def test_a_batch_without_rows_counts_for_nothing_and_is_not_measured() -> None:
    model = torch.nn.Linear(2, 1)
    batch = (torch.zeros(0, 2), torch.zeros(0, 1))
    rows, values = measured(model, batch, lambda output, targets: {"loss": (output - targets).mean()})
    assert (rows, values) == (0, {})
    with pytest.raises(UsageError, match="at least one sample"):
        means(None, sums([(rows, values)]))


def test_values_of_a_batch_are_plain_numbers() -> None:
    model = torch.nn.Identity()
    rows, values = measured(model, (torch.ones(2, 3), torch.zeros(2, 3)), lambda x, y: {"distance": (x - y).mean()})
    assert (rows, values) == (2, {"distance": 1.0})
    with pytest.raises(UsageError):
        measured(model, (torch.ones(2, 3), torch.zeros(2, 3)), lambda x, _: {"all": x})


@pytest.mark.parametrize(
    ("batch", "rows"),
    [((torch.ones(4, 2), torch.ones(4)), 4), ({"ids": torch.ones(3, 1)}, 3), ((torch.tensor(1.0), torch.ones(2)), 2)],
)
def test_the_first_tensor_with_rows_gives_their_number(batch: object, rows: int) -> None:
    assert rows_of(batch) == rows


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader([1, 2]), "pass loader.dataset"),
        (iter([1, 2]), r"list_iterator has none: put its samples into a list"),
    ],
)
def test_what_cannot_be_divided_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        next(part_of(None, data, batch_samples=2, collate=None, device=torch.device("cpu")))
