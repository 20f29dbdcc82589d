"""The step of given layouts: that of the planner's own members, and never below the best."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from heterotrain_core.contract.plan import Layout, LayoutKind, Member
from heterotrain_planner.layout.best import best_members
from heterotrain_planner.layout.known import known_step_seconds
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.template_table import template_table
from support.repeat import times
from unit.planner.layout.instances import a_problem
from unit.planner.layout.sharded_oracle import a_problem as a_sharded_problem


def a_question(seed: int) -> Problem:
    rng = random.Random(seed)
    problem = a_problem(rng, kinds=2, units=5, most=2, memory=(400, 1500), batch_samples=32)
    if seed % 2:
        sharded = a_sharded_problem(seed)[0]
        problem = replace(sharded, least_members=1, may_shard=True, reduces_late=True, batch_samples=24)
    return replace(problem, kinds=tuple(replace(k, update_s_per_byte=rng.choice((0.0, 0.1))) for k in problem.kinds))


def test_the_planners_own_members_have_the_step_that_it_has_found() -> None:
    kinds = set()
    for seed in {*range(times(gate=16, every=80)), 47}:  # the last one has a sharded member
        problem = a_question(seed)
        found = best_members(template_table(problem), problem)
        if not isinstance(found, Cover):
            continue
        kinds |= {member.layout.kind for member in found.members}
        known = known_step_seconds(problem, found.members, [layout.kinds for layout in found.layouts])
        assert known == (pytest.approx(found.step_s, rel=0.02), pytest.approx(found.exchange_s)), seed
    assert kinds == set(LayoutKind)


def test_other_shares_make_no_difference_and_another_cut_does() -> None:
    """Shares follow measurements; the layouts are judged by the shares that would be best."""
    problem = a_problem(random.Random(4), kinds=1, units=5, most=2, memory=(9000, 9000), batch_samples=32)
    problem = replace(problem, kinds=(replace(problem.kinds[0], count=4),), links={})
    name = problem.kinds[0].name

    def step_s(cut: int, *shares: int) -> float:
        layout = Layout(kind=LayoutKind.PIPELINE, cuts=(cut,))
        members = [
            Member(index=index, pool=name, share_samples=share, micro_batch_samples=1, layout=layout)
            for index, share in enumerate(shares)
        ]
        known = known_step_seconds(problem, members, [(name, name)] * len(members))
        assert known is not None
        return known[0]

    even, uneven, worse = step_s(2, 16, 16), step_s(2, 17, 15), step_s(4, 16, 16)
    assert uneven == pytest.approx(even, rel=0.01)
    assert worse != pytest.approx(even, rel=0.05)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(kind=LayoutKind.PIPELINE, cuts=(7,)),
        Layout(kind=LayoutKind.PIPELINE, cuts=(1, 2)),
        Layout(kind=LayoutKind.SHARDED, shards=2),
    ],
)
def test_layouts_of_another_model_have_no_step(layout: Layout) -> None:
    problem = a_problem(random.Random(4), kinds=1, units=5)
    name = problem.kinds[0].name
    member = Member(index=0, pool=name, share_samples=8, micro_batch_samples=1, layout=layout)
    assert known_step_seconds(problem, [member], [(name, name)]) is None
