"""Plans layouts in a thread: a search takes seconds, and the event loop has to serve every job meanwhile.

Passes look answers up. Questions without one are part of their decision, and the answer queues the job again. The
templates of a job's newest model are kept, so that after a loss only a cover of the devices that are left has to be
found. While nothing else is asked, the covers after the loss of any one node are found in advance: most losses are a
look-up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog
from heterotrain_planner.layout.best import best_members
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, NoLayout
from heterotrain_planner.layout.template_table import TemplateTable, template_table

from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.plan.stages import CoverOf
from heterotrain_operator.threads import Threads

MOST_JOBS = 64
"""Jobs whose templates are kept, those that were asked about last."""
MOST_COVERS = 32
"""Answers that are kept for each job, the newest ones."""
MOST_AHEAD = 8
"""Losses that are answered in advance for each job: of a node of each of the first kinds."""
Answer = Cover | NoLayout

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    """What is known about one job's newest model.

    Attributes:
        model: hash of the problem without the devices' numbers.
        templates: its templates for at most some devices; ``None`` before the first search.
        answers: by the number of devices of each kind.
    """

    model: str
    templates: TemplateTable | None = None
    answers: OrderedDict[tuple[int, ...], Answer] = field(default_factory=OrderedDict)


class LayoutPlanner:
    """Answers questions about layouts, one at a time, outside the event loop.

    Args:
        answered: called in the event loop with a job for which there is a new answer.
        threads: search.
    """

    def __init__(self, answered: Callable[[JobKey], None], threads: Threads) -> None:
        self._answered = answered
        self._threads = threads
        self._known: OrderedDict[JobKey, _Known] = OrderedDict()
        self._open: dict[JobKey, Problem] = {}
        """The newest question of each job."""
        self._ahead: dict[JobKey, list[Problem]] = {}
        """Questions that a loss would raise; they wait for those that were asked."""
        self._task: asyncio.Task[None] | None = None

    def cover_of(self, key: JobKey) -> CoverOf:
        """Return what is known of one job's layouts: ``None`` is to be asked."""
        known = self._known.get(key)

        def answer(problem: Problem) -> Answer | None:
            if known is None or known.model != _model(problem):
                return None
            return known.answers.get(_counts(problem))

        return answer

    def ask(self, key: JobKey, problem: Problem) -> None:
        """Search for an answer; it queues the job."""
        model = _model(problem)
        known = self._known.get(key)
        if known is None or known.model != model:
            self._known[key] = _Known(model=model)
        self._known.move_to_end(key)
        while len(self._known) > MOST_JOBS:
            self._known.popitem(last=False)
        self._open[key] = problem
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="layouts")

    async def _work(self) -> None:
        """Answer until no question is left."""
        while self._open or self._ahead:
            asked = bool(self._open)
            if asked:
                key = next(iter(self._open))
                problem = self._open.pop(key)
            else:
                key = next(iter(self._ahead))
                problem = self._ahead[key].pop()
                if not self._ahead[key]:
                    del self._ahead[key]
            known = self._known.get(key)
            if known is None or known.model != _model(problem):
                continue
            if _counts(problem) not in known.answers:
                await self._search(key, known, problem)
            if asked:
                if isinstance(known.answers.get(_counts(problem)), Cover):
                    self._ahead[key] = _after_losses(problem)
                self._answered(key)

    async def _search(self, key: JobKey, known: _Known, problem: Problem) -> None:
        """Find an answer in a thread and keep it."""
        try:
            known.templates, answer = await self._threads.run(solve, known.templates, problem)
        except Exception as error:  # a bug in one job's search must not end the operator
            log.exception("the search for layouts failed by a bug", job=key.name, namespace=key.namespace)
            answer = NoLayout(reason=f"the search for layouts failed by a bug: {error!r}")
        known.answers[_counts(problem)] = answer
        while len(known.answers) > MOST_COVERS:
            known.answers.popitem(last=False)


def _after_losses(problem: Problem) -> list[Problem]:
    """Return the questions after the loss of one node of each kind."""
    found = []
    for index, kind in enumerate(problem.kinds):
        left = max(0, kind.count - kind.devices_per_node)
        kinds = (*problem.kinds[:index], replace(kind, count=left), *problem.kinds[index + 1 :])
        if kind.count and any(each.count for each in kinds):
            found.append(replace(problem, kinds=kinds))
    return found[:MOST_AHEAD]


def solve(templates: TemplateTable | None, problem: Problem) -> tuple[TemplateTable | None, Answer]:
    """Return the best members, and the templates for the next question.

    Args:
        templates: those for the same model, or ``None``; new ones are made where it has too few devices of a kind.
        problem: the question.
    """
    wanted = [kind.count for kind in problem.kinds]
    if templates is None or any(
        kind.count < count for kind, count in zip(templates.problem.kinds, wanted, strict=True)
    ):
        found = template_table(_with_most(problem, templates))
        if isinstance(found, NoLayout):
            found = template_table(problem)  # its reason names the devices that there are
        if isinstance(found, NoLayout):
            return templates, best_members(found, problem)
        templates = found
    return templates, best_members(templates, problem)


def _with_most(problem: Problem, templates: TemplateTable | None) -> Problem:
    """Return the problem with at least the devices of an earlier templates: some of them may come back."""
    if templates is None:
        return problem
    pairs = zip(problem.kinds, templates.problem.kinds, strict=True)
    return replace(problem, kinds=tuple(replace(kind, count=max(kind.count, old.count)) for kind, old in pairs))


def _counts(problem: Problem) -> tuple[int, ...]:
    return tuple(kind.count for kind in problem.kinds)


def _model(problem: Problem) -> str:
    """Return a hash of everything but the devices' numbers."""
    alike = replace(problem, kinds=tuple(replace(kind, count=0) for kind in problem.kinds))
    return hashlib.sha256(repr(alike).encode()).hexdigest()
