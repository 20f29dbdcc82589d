"""Groups of owners: as many as sets of owners, and none more than ranks accept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from heterotrain_core.contract.owners import MOST_OWNER_GROUPS, owner_groups
from heterotrain_core.contract.plan import Layout, LayoutKind
from heterotrain_planner.layout import cover as covers
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.exchange import owner_bytes
from heterotrain_planner.layout.problem import Link
from heterotrain_planner.layout.result import Cover, NoLayout, Template
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from support.repeat import times
from unit.planner.layout.instances import a_problem
from unit.planner.layout.test_cover import roomy
from unit.planner.layout.test_exchange import a_sharded, drawn


@pytest.mark.parametrize("seed", range(times(gate=20, every=1000)))
def test_there_are_as_many_groups_as_sets_of_owners(seed: int) -> None:
    rng = random.Random(seed)
    problem = a_problem(rng, kinds=3, units=5)
    layouts = [drawn(rng, problem) for _ in range(rng.randint(2, 4))]
    found = owner_bytes(problem, layouts)
    several = len(found) > 1  # else all ranks are the owners of everything
    assert owner_groups([layout.planned for layout in layouts]) == (len(found) if several else 0)


def test_a_member_alone_and_whole_members_need_no_groups() -> None:
    assert owner_groups([Layout(kind=LayoutKind.PIPELINE, cuts=(1, 2))]) == 0
    assert owner_groups([Layout()] * 5) == 0
    assert owner_groups([Layout(kind=LayoutKind.SHARDED, shards=4)] * 3) == 4


def test_members_that_need_too_many_groups_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines cut at different units need three groups; without these, other members are found, or a reason."""
    lowered = 0
    for seed in range(40):
        problem = replace(roomy(seed), links={}, default_link=Link(bytes_per_s=20.0), least_members=2)
        templates = template_table(problem)
        if not isinstance(templates, TemplateTable):
            continue
        found = cover(templates)
        if not isinstance(found, Cover):
            continue
        needed = owner_groups([member.layout for member in found.members])
        if needed < 2:
            continue
        lowered += 1
        monkeypatch.setattr(covers, "MOST_OWNER_GROUPS", needed - 1)
        less = cover(templates)
        if isinstance(less, Cover):
            assert owner_groups([member.layout for member in less.members]) < needed
            assert less.step_s >= found.step_s * 0.98
        else:
            assert "groups of owners" in less.reason
        monkeypatch.setattr(covers, "MOST_OWNER_GROUPS", MOST_OWNER_GROUPS)
    assert lowered > 2


def test_two_members_of_too_many_shards_are_refused_with_the_number() -> None:
    shards = MOST_OWNER_GROUPS + 1
    layout = a_sharded(["k0"] * shards, [1] * shards)
    layout = replace(layout, shards=tuple(replace(shard, state_ratio=1 / shards) for shard in layout.shards))
    problem = roomy(3)
    kinds = (replace(problem.kinds[0], count=2 * shards, memory_bytes=1), replace(problem.kinds[1], count=1))
    problem = replace(problem, kinds=kinds, least_members=2)
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    template = Template(devices=(shards, 0), micro_batch_samples=8, first_s=1e-3, next_s=1e-3, layout=layout)
    answer = cover(templates, further=(template,))
    assert isinstance(answer, NoLayout)
    assert f"{shards} different groups of owners" in answer.reason
