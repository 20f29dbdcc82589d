"""One copy of a data set for all loader processes."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from heterotrain.data.shared_copy import SharedCopy


def received(thing: Any) -> Any:
    """Return the object as a process gets it."""
    copy = SharedCopy(thing)
    found: SharedCopy = pickle.loads(bytes(ForkingPickler.dumps(copy)))  # noqa: S301  # its own bytes
    copy.close()
    return found.load()


def test_values_and_formats_stay() -> None:
    thing = {
        "list": [torch.full((3,), float(number)) for number in range(300)], "empty": torch.zeros(0, 4),
        "array": np.arange(6.0).reshape(2, 3)[:, ::2], "bf16": torch.ones(2, dtype=torch.bfloat16),
        "turned": torch.arange(6).reshape(2, 3).t(), "parameter": torch.nn.Parameter(torch.ones(2)), "text": "a",
    }  # fmt: skip
    found = received(thing)
    assert all(map(torch.equal, found["list"], thing["list"]))
    for name in ("empty", "bf16", "turned", "parameter"):
        assert found[name].dtype == thing[name].dtype  # type: ignore[attr-defined]  # tensors
        torch.testing.assert_close(found[name], thing[name])
    assert np.array_equal(found["array"], thing["array"])
    assert (found["text"], found["turned"].stride()) == ("a", (1, 3))


def test_tensors_that_share_memory_are_sent_once_and_may_be_written_to() -> None:
    whole = torch.arange(1000.0)
    found = received(list(whole.split(10)))
    assert {each.untyped_storage().data_ptr() for each in found} == {found[0].untyped_storage().data_ptr()}
    found[0].zero_()
    assert whole[9] == 9


def test_what_the_script_shares_among_processes_stays_shared() -> None:
    cache = torch.zeros(4).share_memory_()
    received([cache, cache[2:]])[1][0] = 7
    assert cache.tolist() == [0, 0, 7, 0]


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        SharedCopy(lambda: None)
