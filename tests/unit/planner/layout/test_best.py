"""The best members of a problem that allows several kinds of layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract.consistency import MAX_WEIGHT
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_planner.layout.best import allowed_kinds, best_members, shards_of
from heterotrain_planner.layout.pass_time import gathered_bytes
from heterotrain_planner.layout.result import Cover, NoLayout
from heterotrain_planner.layout.template_table import template_table
from support.repeat import times
from unit.planner.layout.sharded_oracle import a_problem


def test_no_allowed_layout_is_faster_than_the_best_one() -> None:
    """More kinds of layouts are never slower, and a sharded member takes no less than any division could."""
    seen = set()
    for seed in range(times(gate=4, every=12)):
        problem = replace(a_problem(seed)[0], least_members=1)
        templates = template_table(problem)
        rates = []
        for may_cut, may_shard in ((False, False), (True, False), (False, True), (True, True)):
            allowed = replace(problem, may_cut=may_cut, may_shard=may_shard)
            found = best_members(templates, allowed)
            rates.append(found.samples_per_s if isinstance(found, Cover) else 0.0)
            if isinstance(found, Cover):
                kinds = {member.layout.kind for member in found.members}
                assert kinds <= allowed_kinds(allowed)
                seen |= kinds
                assert sum(member.share_samples for member in found.members) == problem.batch_samples
        assert max(rates) <= rates[-1] * (1 + 1e-6)
    assert LayoutKind.SHARDED in seen


def test_a_single_member_is_made_where_no_pipeline_holds_the_model() -> None:
    found = None
    for seed in range(times(gate=12, every=40)):
        problem = replace(a_problem(seed)[0], least_members=1, may_shard=True)
        templates = shards_of(problem)
        if templates:
            found = best_members(NoLayout(reason="no pipeline"), problem)
            assert isinstance(found, Cover)
            (member,) = found.members
            passes = -(-problem.batch_samples // member.micro_batch_samples)
            assert found.step_s == pytest.approx(
                min(x.first_s + (-(-problem.batch_samples // x.micro_batch_samples) - 1) * x.next_s for x in templates)
            )
            assert member.micro_batches == passes
            assert 0 < found.prediction.efficiency <= 1
            two = replace(problem, least_members=2)
            assert best_members(NoLayout(reason="no pipeline"), two) == NoLayout(reason="no pipeline")
    assert found is not None


def test_a_plan_names_parts_by_weights() -> None:
    for seed in range(20):
        problem = replace(a_problem(seed)[0], may_shard=True)
        for template in shards_of(problem):
            named = template.layout.planned
            whole = sum(named.state_weights)
            assert len(named.state_weights) == len(template.layout.shards) == named.shards
            for weight, shard in zip(named.state_weights, template.layout.shards, strict=True):
                assert 1 <= weight <= MAX_WEIGHT
                assert weight / whole == pytest.approx(shard.state_ratio, abs=1e-3)
            assert sum(named.sample_weights) == template.micro_batch_samples


def test_ends_that_stay_gathered_take_memory() -> None:
    problem = a_problem(0)[0]
    stay = replace(problem, reduces_late=True)
    sizes = [unit.parameter_bytes for unit in problem.units]
    assert gathered_bytes(stay, 2) >= 2 * (sizes[0] + sizes[-1])
    assert gathered_bytes(stay, 1) == 0
