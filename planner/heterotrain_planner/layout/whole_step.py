"""The whole step of given members: simulated shares of the batch, the updates, and the exchange.

The search for covers chooses templates by the formula of their shares, before it knows their exchange. Here a step is
what it is predicted to be in the end, so that members can be compared that differ in a single cut.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heterotrain_planner.layout.costs import Costs
from heterotrain_planner.layout.cut import layout_of
from heterotrain_planner.layout.exchange import shortest_exchange
from heterotrain_planner.layout.result import DeviceLayout, Template
from heterotrain_planner.layout.schedule import Passes, passes, share_seconds
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.update import update_seconds


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A member of stages.

    Attributes:
        kinds: of each device, by index.
        edges: between units, the first and the last one included.
        size: of micro-batch, by index.
        most: micro-batches that its memory is planned for; 0 for as many as possible.
    """

    kinds: tuple[int, ...]
    edges: tuple[int, ...]
    size: int
    most: int = 0

    @property
    def stages(self) -> tuple[tuple[int, int, int], ...]:
        """(Index of the kind, first edge, end edge) of each stage."""
        return tuple(zip(self.kinds, self.edges, self.edges[1:], strict=False))


Choice = Pipeline | Template
"""A member before its share is known; a template is a sharded one."""


@dataclass(slots=True, kw_only=True)
class TimedMember:
    """A member with the seconds of its shares, update included.

    Attributes:
        layout: what each device holds.
        samples: of a micro-batch.
        most: micro-batches that its memory permits.
        lines: (seconds once, seconds of each micro-batch, micro-batches beyond which it counts) that no share falls
            below: passes in front of each stage, and its own; and what ``step_bound`` shows of one pipeline.
        update_s: once a step.
        passes: of the stages; empty for a sharded member.
        known_s: seconds by number of micro-batches, as far as they were asked for.
    """

    layout: DeviceLayout
    samples: int
    most: int
    lines: tuple[tuple[float, float, int], ...]
    update_s: float
    passes: tuple[Passes, ...] = ()
    known_s: dict[int, float] = field(default_factory=dict)

    def seconds(self, count: int) -> float:
        """Return the seconds of so many micro-batches."""
        if count not in self.known_s:
            once_s, each_s, _ = self.lines[0]
            own_s = share_seconds(self.passes, count) if self.passes else once_s + count * each_s
            self.known_s[count] = own_s + self.update_s
        return self.known_s[count]

    def at_most(self, level_s: float) -> int:
        """Return how many micro-batches the lines permit within a time."""
        left_s = level_s - self.update_s
        found = self.most
        for once_s, each_s, beyond in self.lines:
            if once_s + found * each_s > left_s and found > beyond:
                found = max(beyond, math.floor((left_s - once_s) / each_s + 1e-9))
        return found


class WholeStep:
    """Predicts steps of members, and keeps what members have in common.

    Args:
        templates: of the model.
    """

    def __init__(self, templates: TemplateTable) -> None:
        self.problem = templates.problem
        self.costs: tuple[Costs, ...] = templates.costs[: len(templates.problem.micro_batches)]
        self._timed: dict[Choice, TimedMember | None] = {}
        self._exchange_s: dict[frozenset[tuple[Choice, int]], float] = {}

    def timed(self, choice: Choice) -> TimedMember | None:
        """Return a member with its times; ``None`` where memory permits not even one micro-batch."""
        if choice not in self._timed:
            self._timed[choice] = _sharded(self, choice) if isinstance(choice, Template) else self._cut(choice)
        return self._timed[choice]

    def seconds(self, members: Sequence[Choice], shorter_than_s: float = math.inf) -> tuple[float, tuple[int, ...]]:
        """Return the step with the best shares, and the micro-batches of each member; infinite where none is shorter.

        The shares are exact: micro-batches go one by one to the member that then ends first.
        """
        batch = self.problem.batch_samples
        timed = [found for member in members if (found := self.timed(member)) is not None]
        if len(timed) < len(members) or sum(each.samples for each in timed) - len(timed) >= batch:
            return math.inf, ()
        low_s, high_s = max(each.seconds(1) for each in timed), shorter_than_s
        if low_s >= high_s or sum(each.at_most(high_s) * each.samples for each in timed) < batch:
            return math.inf, ()
        exchange_s = self._exchange(members)
        high_s = high_s - exchange_s if high_s < math.inf else max(each.seconds(each.most) for each in timed)
        if low_s >= high_s * (1 + 1e-12) or sum(each.at_most(high_s) * each.samples for each in timed) < batch:
            return math.inf, ()
        for _ in range(20):
            middle_s = (low_s + high_s) / 2
            enough = sum(each.at_most(middle_s) * each.samples for each in timed) >= batch
            low_s, high_s = (low_s, middle_s) if enough else (middle_s, high_s)
        counts = [max(1, each.at_most(low_s)) for each in timed]
        for index, each in enumerate(timed):
            while counts[index] > 1 and each.seconds(counts[index]) > low_s:
                counts[index] -= 1
        self._fill(timed, counts)
        step_s = max(each.seconds(count) for each, count in zip(timed, counts, strict=True)) + exchange_s
        return (step_s, tuple(counts)) if step_s < shorter_than_s else (math.inf, ())

    def _fill(self, timed: Sequence[TimedMember], counts: list[int]) -> None:
        """Add micro-batches until the batch is taken."""
        missing = self.problem.batch_samples - sum(n * each.samples for n, each in zip(counts, timed, strict=True))
        queue = [(each.seconds(counts[i] + 1), i) for i, each in enumerate(timed) if counts[i] < each.most]
        heapq.heapify(queue)
        while missing > 0:
            _, index = heapq.heappop(queue)
            counts[index] += 1
            missing -= timed[index].samples
            if counts[index] < timed[index].most:
                heapq.heappush(queue, (timed[index].seconds(counts[index] + 1), index))

    def _exchange(self, members: Sequence[Choice]) -> float:
        """Return the seconds of the exchange with the best order of the members in their rings."""
        key = frozenset(Counter(members).items())
        if key not in self._exchange_s:
            layouts = [found.layout for member in members if (found := self.timed(member)) is not None]
            self._exchange_s[key], _ = shortest_exchange(self.problem, layouts)
        return self._exchange_s[key]

    def _cut(self, choice: Pipeline) -> TimedMember | None:
        costs = self.costs[choice.size]
        costs = replace(costs, micro_batches=min(choice.most, costs.micro_batches)) if choice.most else costs
        most = costs.most_micro_batches(choice.stages)
        if not most:
            return None
        layout = layout_of(self.problem, replace(costs, micro_batches=most), choice.stages)
        own = passes(layout.stages)
        lines, before_s, whole_s = [], 0.0, sum(map(sum, own))
        for position, busy_s in zip(range(len(own), 0, -1), map(sum, own), strict=True):
            lines.append((before_s, busy_s, 0))
            before_s += busy_s
            idle_s = 2 * (whole_s - before_s) - (position - 1) * busy_s
            if idle_s > 0:
                lines.append((before_s - busy_s + idle_s, busy_s, position))
        return TimedMember(
            layout=layout,
            samples=costs.micro_batch_samples,
            most=most,
            lines=tuple(lines),
            update_s=update_seconds(self.problem, layout),
            passes=own,
        )


def _sharded(step: WholeStep, template: Template) -> TimedMember:
    samples = template.micro_batch_samples
    return TimedMember(
        layout=template.layout,
        samples=samples,
        most=-(-step.problem.batch_samples // samples),
        lines=((template.first_s - template.next_s, template.next_s, 0),),
        update_s=update_seconds(step.problem, template.layout),
    )
