"""Means over a data set, from sums over the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.evaluated_data import EvaluatedData
from heterotrain.evaluation import means, measured, part_of, rows_of, sums
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler


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
        (
            DataLoader([1, 2], sampler=SubsetRandomSampler([0])),
            "by a SubsetRandomSampler: pass torch",
        ),
        (DataLoader([1, 2], sampler=RandomSampler([1, 2], num_samples=1)), "by a RandomSampler"),
        (DataLoader([1, 2], batch_sampler=[[0], [1]]), "has a batch_sampler or batch_size=None"),
        (iter([1, 2]), "a list_iterator is not a data set"),
    ],
)
def test_what_cannot_be_divided_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvaluatedData(data, batch_samples=2, collate=None, seed=0)


class Stream(IterableDataset[Any]):
    """Some numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples)


@pytest.mark.parametrize("samples", [0, 1, 7, 8])
@pytest.mark.parametrize("kind", [list, Stream, lambda n: DataLoader(range(n), 3), lambda n: DataLoader(Stream(n), 3)])
def test_every_sample_comes_once(kind: Callable[[Any], Any], samples: int) -> None:
    data: Any = kind(range(samples) if kind is list else samples)
    evaluated = EvaluatedData(data, batch_samples=None if isinstance(data, DataLoader) else 3, collate=None, seed=0)
    parts = part_of(None, evaluated, device=torch.device("cpu"))
    if samples == 0 and evaluated.is_stream:
        with pytest.raises(UsageError, match="must not be empty"):
            next(parts)
        return
    found = [batch.tolist() for batch in parts]
    assert [each for batch in found for each in batch] == [*range(samples)]
    assert all(len(batch) == 3 for batch in found[:-1])
