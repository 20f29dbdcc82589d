"""Membership without an operator."""

from __future__ import annotations

import pytest
from heterotrain.membership.fixed import store_prefix


def test_each_training_of_a_process_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun outlives a training, and each of its restarts."""
    found = [store_prefix() for _ in range(3)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert len({*found, store_prefix()}) == 4
