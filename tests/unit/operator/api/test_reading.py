"""What the API server may have let through is checked again, and each refusal is one sentence that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.api.reading import SpecError, read_spec
from support.fake_cluster import job_body, pool

RANGE = {"min": 64, "max": 4096}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"globalBatchSize": None}, "exactly one of globalBatchSize and adaptiveBatch"),
    "two batches": (
        {"globalBatchSize": 64, "adaptiveBatch": RANGE},
        "exactly one of globalBatchSize and adaptiveBatch",
    ),
    "minimum above maximum": (
        {"adaptiveBatch": {"min": 9, "max": 8}},
        "adaptiveBatch.min 9 is above its max 8: lower it",
    ),
    "batch below workers": ({"globalBatchSize": 2}, "globalBatchSize is 2, fewer than the 3 workers"),
    "least batch below workers": ({"adaptiveBatch": {"min": 2, "max": 8}}, "adaptiveBatch.min is 2, fewer than the 3"),
    "steps without everySteps": ({"rebalance": {"boundary": "Steps"}}, "everySteps belongs to boundary: Steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_told(case: str) -> None:
    training, sentence = REFUSED[case]
    with pytest.raises(SpecError) as error:
        read_spec(job_body(spec={"training": training}))
    assert sentence in str(error.value)


def test_a_deadline_beyond_all_calendars_is_refused() -> None:
    spec = {"objective": "Deadline", "deadline": "9999-12-31T23:59:59-14:00"}
    with pytest.raises(SpecError, match="give one before the year 9999"):
        read_spec(job_body(spec=spec))


def test_training_starts_with_the_batch_that_the_learning_rate_belongs_to() -> None:
    fixed = read_spec(job_body(pool("a"), spec={"training": {"globalBatchSize": 512}}))
    adaptive = read_spec(job_body(pool("a"), spec={"training": {"adaptiveBatch": RANGE}}))
    assert (fixed.training.base_batch_samples, adaptive.training.base_batch_samples) == (512, 64)


def test_cost_without_prices_is_refused() -> None:
    unpriced = job_body(pool("a", pricePerHour="3.67"), pool("b"), spec={"objective": "Cost"})
    with pytest.raises(SpecError, match="pool b has no pricePerHour: give every pool its price"):
        read_spec(unpriced)
