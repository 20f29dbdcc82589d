"""The statement of a waiting job's latest start: never too early, and seldom changed."""

from __future__ import annotations

import random

import pytest
from heterotrain_operator.decide.grant import (
    LACKS,
    NOTICED_EARLIER_S,
    NOTICED_S,
    JobGrant,
    LatestStart,
    reason_in,
    restated,
)


def test_a_latest_start_that_varies_with_each_scrape_is_stated_once() -> None:
    """Within a minute: the status stays. Once it is later, or much earlier, the status says so."""
    rng = random.Random(2)  # noqa: S311  # reproducible
    stated = restated(None, 1800.0, now_s=0.0)
    for now_s in range(0, 600, 10):
        stated = restated(stated, 1800.0 - now_s + rng.uniform(-NOTICED_S, NOTICED_S), now_s=float(now_s))
        assert stated == LatestStart(1800.0, 0.0)
    assert restated(stated, 1200.0 + NOTICED_S + 1, now_s=600.0) == LatestStart(1261.0, 600.0)
    assert restated(stated, 1200.0 - NOTICED_EARLIER_S - 1, now_s=600.0) == LatestStart(899.0, 600.0)
    assert restated(stated, None, now_s=600.0) is None


def test_a_latest_start_is_stated_in_minutes() -> None:
    grant = JobGrant(reason="waits", lacks=f"{LACKS}1 v100", latest_start=LatestStart(61.0, 0.0))
    assert grant.message == (
        "waits; it starts at the latest 2 minutes after 1970-01-01T00:00:00Z, as rates are predicted and if no higher "
        "priority comes; the next member lacks 1 v100"
    )
    assert JobGrant(reason="waits").message == "waits"
    assert JobGrant().message == ""


@pytest.mark.parametrize("reason", ["", "2 v100: no other job wants more"])
@pytest.mark.parametrize("lacks", ["", f"{LACKS}1 v100"])
def test_the_reason_is_found_again_in_the_message(reason: str, lacks: str) -> None:
    """A restarted operator reads it from the status, and would otherwise write each status again."""
    grant = JobGrant(reason=reason, lacks=lacks, latest_start=LatestStart(60.0, 0.0))
    assert grant.message != reason
    assert reason_in(grant.message) == reason
    assert reason_in(reason) == reason
