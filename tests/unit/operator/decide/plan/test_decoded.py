"""Decoded plans: each text is decoded once for its job, and the memory for them is bounded."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Plan
from heterotrain_operator.decide.plan import decoded as module
from heterotrain_operator.decide.plan.decoded import DecodedPlans
from support.fake_cluster import a_running_job


def test_each_plan_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(text: str, *, job_uid: str) -> Plan | Refused:
        calls.append(job_uid)
        return decode_plan(text, job_uid=job_uid)

    cluster, plans = a_running_job(), DecodedPlans()
    monkeypatch.setattr(module, "decode_plan", counted)
    found = cluster.plan_view
    assert found is not None
    uid = cluster.job_view.uid
    first = plans.decode(found.text, job_uid=uid)
    assert isinstance(first, Plan)
    assert plans.decode(str(found.text), job_uid=uid) is first
    assert calls == [uid]
    refused = plans.decode(found.text, job_uid="another")
    assert isinstance(refused, Refused), "a plan is for one job"
    assert plans.decode("{}", job_uid=uid) != first, "another text is another plan"
    assert plans.decode(found.text, job_uid=uid) == first
    assert calls == [uid, "another", uid, uid]


def test_memory_for_decoded_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHARACTERS", 100)
    plans = DecodedPlans()
    for number in range(100):
        plans.decode("x" * 30, job_uid=f"job-{number}")
        assert len(plans._known) <= 3
        assert plans._characters == sum(len(text) for text, _ in plans._known.values()) <= 100
