"""Fixtures for workers with a GPU. `make gpu` runs them; nothing here is part of `make test`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from distributed.conftest import operate
from distributed.harness import Zygote

__all__ = ["operate"]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Fail without a GPU: a skipped test proves nothing."""
    if not torch.cuda.is_available():
        pytest.exit(
            "these tests need a GPU that PyTorch can use; torch.cuda.is_available() is false here", returncode=1
        )


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks workers, on a machine with a GPU."""
    made = Zygote(sees_gpus=True)
    yield made
    made.close()
