"""Layouts are searched in a thread: passes get no answer first, then the job is queued again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.engine import layout_planner
from heterotrain_operator.engine.layout_planner import MOST_JOBS, LayoutPlanner
from heterotrain_operator.threads import Threads
from heterotrain_planner.layout.problem import DeviceKind, Problem
from heterotrain_planner.layout.result import Cover, NoLayout
from heterotrain_planner.layout.template_table import TemplateTable
from support.executors import ByHand, at_once
from support.waiting import until

KEY = JobKey("ns", "job")


def a_problem(*counts: int, memory: int = 3) -> Problem:
    """Return four equal units on devices of two kinds that hold some of them."""
    points = (UnitSeconds(micro_batch_samples=1, forward_s=0.01, backward_s=0.02),)
    unit = UnitProfile(
        name="unit", parameter_bytes=100, activation_bytes=1, boundary_bytes=1, seconds={"a": points, "b": points}
    )
    kinds = tuple(
        DeviceKind(name=name, count=count, memory_bytes=memory * 400 + 50)
        for name, count in zip("ab", counts, strict=True)
    )
    return Problem(units=(unit,) * 4, kinds=kinds, batch_samples=16, micro_batches=(1, 2))


async def answered(planner: LayoutPlanner, queued: list[JobKey], problem: Problem) -> Cover | NoLayout:
    """Ask; where there is no answer yet, wait until the job is queued, and ask again."""
    queued.clear()
    if planner.cover_of(KEY)(problem) is None:
        planner.ask(KEY, problem)
        await until(lambda: queued == [KEY], "an answer", every_s=0.01)
    found = planner.cover_of(KEY)(problem)
    assert found is not None
    return found


async def test_an_answer_comes_later_and_stays() -> None:
    queued: list[JobKey] = []
    planner = LayoutPlanner(queued.append, at_once())
    found = await answered(planner, queued, a_problem(1, 1))
    assert isinstance(found, Cover)
    assert planner.cover_of(KEY)(a_problem(1, 1)) is found


async def test_after_a_loss_the_templates_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer devices are a look-up; more devices, or another model, need a new search."""
    searches: list[list[int]] = []
    real = layout_planner.template_table

    def counting(problem: Problem) -> TemplateTable | NoLayout:
        searches.append([kind.count for kind in problem.kinds])
        return real(problem)

    monkeypatch.setattr(layout_planner, "template_table", counting)
    queued: list[JobKey] = []
    planner = LayoutPlanner(queued.append, at_once())
    await answered(planner, queued, a_problem(2, 2))
    assert isinstance(await answered(planner, queued, a_problem(1, 2)), Cover)
    assert searches == [[2, 2]]
    await answered(planner, queued, a_problem(3, 1))
    assert searches == [[2, 2], [3, 2]], "devices that left may come back"
    await answered(planner, queued, a_problem(1, 1, memory=4))
    assert len(searches) == 3


async def test_the_loss_of_a_node_is_answered_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of b share a node, so they are lost together. Questions that were asked come first."""
    solved: list[list[int]] = []
    real = layout_planner.solve

    def noted(templates: TemplateTable | None, problem: Problem) -> tuple[TemplateTable | None, Cover | NoLayout]:
        solved.append([kind.count for kind in problem.kinds])
        return real(templates, problem)

    def nodes_of_two(*counts: int) -> Problem:
        problem = a_problem(*counts)
        return replace(problem, kinds=(problem.kinds[0], replace(problem.kinds[1], devices_per_node=2)))

    monkeypatch.setattr(layout_planner, "solve", noted)
    queued: list[JobKey] = []
    planner = LayoutPlanner(queued.append, at_once())
    await answered(planner, queued, nodes_of_two(2, 4))
    await until(lambda: len(solved) == 3, "answers in advance", every_s=0.01)
    known, left = planner.cover_of(KEY), (nodes_of_two(1, 4), nodes_of_two(2, 2))
    await until(lambda: all(isinstance(known(each), Cover) for each in left), "the last of them", every_s=0.01)
    assert solved[0] == [2, 4]
    assert solved.count([1, 4]) == solved.count([2, 2]) == 1


async def test_what_does_not_fit_is_told_of_the_devices_that_there_are() -> None:
    queued: list[JobKey] = []
    planner = LayoutPlanner(queued.append, at_once())
    await answered(planner, queued, a_problem(1, 1))
    found = await answered(planner, queued, a_problem(1, 0))
    assert isinstance(found, NoLayout)
    assert "on 1 a" in found.reason
    assert "Add 1" in found.reason


async def test_the_loop_serves_others_during_a_search_and_only_the_newest_question_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, asked = ByHand(), []
    real = layout_planner.solve

    def slow(templates: TemplateTable | None, problem: Problem) -> tuple[TemplateTable | None, Cover | NoLayout]:
        asked.append([kind.count for kind in problem.kinds])
        return real(templates, problem)

    monkeypatch.setattr(layout_planner, "solve", slow)
    queued: list[JobKey] = []
    planner = LayoutPlanner(queued.append, Threads(executor))
    planner.ask(KEY, a_problem(1, 1))
    await until(lambda: executor.waiting == 1, "a search", every_s=0.0)
    planner.ask(KEY, a_problem(1, 2))
    planner.ask(KEY, a_problem(2, 2))
    executor.step()
    await until(lambda: executor.waiting == 1, "the next search", every_s=0.0)
    executor.step()
    await until(lambda: len(queued) == 2, "both answers", every_s=0.0)
    assert asked[:2] == [[1, 1], [2, 2]]


async def test_a_bug_in_the_search_is_the_job_s_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(layout_planner, "solve", broken)
    queued: list[JobKey] = []
    found = await answered(LayoutPlanner(queued.append, at_once()), queued, a_problem(1, 1))
    assert isinstance(found, NoLayout)
    assert "failed by a bug: ZeroDivisionError()" in found.reason


async def test_the_number_of_jobs_that_are_kept_is_bounded() -> None:
    queued: list[JobKey] = []
    planner = LayoutPlanner(queued.append, at_once())
    for number in range(MOST_JOBS + 3):
        planner.ask(JobKey("ns", f"job{number}"), replace(a_problem(1, 1), batch_samples=16 + number))
    await until(lambda: len(queued) >= MOST_JOBS, "an answer", every_s=0.01)
    assert len(planner._known) == MOST_JOBS
