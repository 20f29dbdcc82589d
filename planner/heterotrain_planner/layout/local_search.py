"""Members of few devices, made better by small changes as long as their whole step becomes shorter.

Templates are chosen by a formula of their shares and a rough exchange, and cut one by one. With few devices, that can
be far from the best: members should be cut at the same units, devices change places between them, or a fill counts
more than the formula says. So a search starts at all ways of forming members that look good, and changes edges, places
of devices, sizes of micro-batches and whole members. Every step is worked out as it is predicted in the end.

Legend: ``T`` times, ``J`` templates.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from heterotrain_planner.layout.costs import Costs
from heterotrain_planner.layout.cut import finalists, slowest_with_room
from heterotrain_planner.layout.equal_members import least_slowest
from heterotrain_planner.layout.exchange import rough_exchange
from heterotrain_planner.layout.level import TemplateOptions
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.whole_step import Choice, Pipeline, WholeStep
from heterotrain_planner.layout.worked_out import WorkedOut, curve_of

MOST_PARTITIONS = 1000
"""Ways of forming members that are looked at; where there are more, the search starts at known members only."""
MOST_STARTS = 6
NEAR = 1.3
"""Step of a start over the shortest one by the formula, at most."""
MOST_STEPS = 2000
"""Steps that are worked out."""
_BETTER = 1e-6
"""Part of a step by which a change has to shorten it."""
_TIMES = 96
"""Times between which the formula is interpolated."""
_OTHER_LIMITS = (1, 2, 3)
"""Most micro-batches for which cuts are tried besides the whole batch's."""

Members = tuple[Choice, ...]


class LocalSearch:
    """Looks for members with the shortest step.

    Args:
        templates: of the model.
        options: the templates that members may have.
        devices: by kind, that may be used.
    """

    def __init__(self, templates: TemplateTable, options: TemplateOptions, devices: Sequence[int]) -> None:
        self._templates, self._options, self._devices = templates, options, tuple(devices)
        self.step = WholeStep(templates)
        self._left = MOST_STEPS
        self._limited: dict[tuple[int, int], Costs] = {}
        self._cuts: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], ...]] = {}
        self._most_stages = int(templates.family.counts_UK.sum(axis=1).max()) if menu_has_pipelines(options) else 1

    def best(self, known: Sequence[Members], shorter_than_s: float) -> tuple[float, Members, tuple[int, ...]] | None:
        """Return the shortest step with its members and their micro-batches; ``None`` for none below a given one.

        Args:
            known: members to start at, besides those that are formed here.
            shorter_than_s: the step to beat.
        """
        best: tuple[float, Members, tuple[int, ...]] | None = None
        for members in dict.fromkeys([*known, *self._starts()]):
            found = self._descend(members)
            limit_s = shorter_than_s * (1 - _BETTER) if best is None else best[0]
            if found is not None and found[0] < limit_s:
                best = found
        return best

    def choices(self, cover: Cover) -> Members:
        """Return the members of a cover as this search changes them."""
        kinds = {kind.name: index for index, kind in enumerate(self._templates.problem.kinds)}
        found: list[Choice] = []
        for member, layout in zip(cover.members, cover.layouts, strict=True):
            if layout.shards:
                found.append(next(each for each in self._options.further if each.layout == layout))
                continue
            size = self._templates.problem.micro_batches.index(member.micro_batch_samples)
            units = [0, *(stage.last_unit + 1 for stage in layout.stages)]
            edges = np.searchsorted(self.step.costs[size].unit_E, units).tolist()
            most = (member.cap_samples or 0) // member.micro_batch_samples
            found.append(Pipeline(tuple(kinds[name] for name in layout.kinds), tuple(edges), size, most))
        return tuple(found)

    def worked_out(self, member: Choice, count: int) -> WorkedOut:
        """Return a member as covers have it, with the curve of its shares near so many micro-batches."""
        timed = self.step.timed(member)
        assert timed is not None  # noqa: S101  # its step is known
        slowest_s = max(each_s for _, each_s, _ in timed.lines)
        roomy_s = slowest_s
        if isinstance(member, Pipeline):
            need = [member.kinds.count(kind) for kind in range(len(self._devices))]
            roomy_s = slowest_with_room(self.step.costs[member.size], need)
        return WorkedOut(
            layout=timed.layout,
            micro_batch_samples=timed.samples,
            most_micro_batches=timed.most,
            roomy_slowest_s=roomy_s,
            update_s=timed.update_s,
            curve=curve_of(slowest_s / timed.samples, max(0.0, timed.seconds(count) - count * slowest_s)),
        )

    def _descend(self, members: Members) -> tuple[float, Members, tuple[int, ...]] | None:
        """Return the members that no single change makes better, from these on."""
        step_s, counts = self.step.seconds(members)
        if not counts:
            return None
        tried = {members}
        while self._left > 0:
            better: tuple[float, Members, tuple[int, ...]] | None = None
            for other in self._neighbours(members):
                if other in tried or self._left <= 0:
                    continue
                tried.add(other)
                self._left -= 1
                limit_s = step_s * (1 - _BETTER) if better is None else better[0]
                other_s, other_counts = self.step.seconds(other, limit_s)
                if other_counts:
                    better = (other_s, other, other_counts)
            if better is None:
                break
            step_s, members, counts = better
        return step_s, members, counts

    # -- where the search starts -------------------------------------------------------------------------------------

    def _starts(self) -> list[Members]:
        """Return the ways of forming members that are best by the formula, each cut for about its share."""
        options, problem = self._options, self._templates.problem
        possible = np.isfinite(options.first_BJ).any(axis=0) & (options.need_JK <= np.array(self._devices)).all(axis=1)
        columns: dict[tuple[int, ...], list[int]] = {}
        for column in np.flatnonzero(possible).tolist():
            columns.setdefault(tuple(options.need_JK[column].tolist()), []).append(column)
        ways = list(itertools.islice(_partitions(self._devices, sorted(columns)), MOST_PARTITIONS + 1))
        if len(ways) > MOST_PARTITIONS or not columns:
            return []
        first = options.first_BJ[np.isfinite(options.first_BJ)]
        times_T = np.geomspace(first.min(), (first.max() + options.batch_samples * _most(options)), _TIMES)
        samples_TJ = np.array([options.samples(float(at_s))[0] for at_s in times_T])
        found = []
        for way in ways:
            own_TM = np.stack([samples_TJ[:, columns[need]].max(axis=1) for need in way], axis=1)
            enough_T = (own_TM > 0).all(axis=1) & (own_TM.sum(axis=1) >= problem.batch_samples)
            if len(way) >= problem.least_members and enough_T.any():
                at = int(enough_T.argmax())
                found.append((float(times_T[at]) + rough_exchange(problem, Counter(way)), at, way))
        found.sort(key=lambda each: each[0])
        near = [each for each in found if each[0] <= NEAR * found[0][0]][:MOST_STARTS]
        return [self._cut_for(way, columns, samples_TJ[at], float(times_T[at])) for _, at, way in near]

    def _cut_for(
        self, way: Sequence[tuple[int, ...]], columns: dict[tuple[int, ...], list[int]], samples_J: object, at_s: float
    ) -> Members:
        """Return the members of these devices with the cuts that are best for their shares within a time."""
        options = self._options
        _, row_J = options.samples(at_s)
        count_BJ = options.micro_batches(at_s)
        members: list[Choice] = []
        for need in way:
            column = max(columns[need], key=lambda j: float(np.asarray(samples_J)[j]))
            if column >= options.pipelines:
                members.append(options.further[column - options.pipelines])
                continue
            row = int(row_J[column])
            costs = self._templates.costs[row]
            cut = finalists(costs, need, max(1, int(count_BJ[row, column])))[0]
            size = self._templates.problem.micro_batches.index(costs.micro_batch_samples)
            edges = (0, *(end for _, _, end in cut.stages))
            members.append(Pipeline(tuple(kind for kind, _, _ in cut.stages), edges, size))
        return tuple(members)

    # -- small changes -----------------------------------------------------------------------------------------------

    def _neighbours(self, members: Members) -> Iterator[Members]:
        """Yield members that differ a little: in cuts, sizes, places of devices, or whole members."""
        yield from _shifted(members)
        yield from self._resized(members)
        yield from self._exchanged(members)
        yield from self._moved(members)

    def _resized(self, members: Members) -> Iterator[Members]:
        for index, member in enumerate(members):
            if isinstance(member, Pipeline):
                others = [replace(member, size=size) for size in range(len(self.step.costs)) if size != member.size]
                if self._templates.problem.may_recompute:  # with fewer micro-batches, fewer stages compute again
                    others += [replace(member, most=most) for most in (0, *_OTHER_LIMITS[: len(member.kinds) - 1])]
                for other in others:
                    yield (*members[:index], other, *members[index + 1 :])

    def _exchanged(self, members: Members) -> Iterator[Members]:
        """Yield members of which two devices of different kinds change places, or one with an unused device."""
        places = [
            (i, at) for i, each in enumerate(members) if isinstance(each, Pipeline) for at in range(len(each.kinds))
        ]
        kinds = [list(each.kinds) if isinstance(each, Pipeline) else [] for each in members]
        for (i, a), (j, b) in itertools.combinations(places, 2):
            if kinds[i][a] != kinds[j][b]:
                kinds[i][a], kinds[j][b] = kinds[j][b], kinds[i][a]
                yield from self._recut(members, {i: tuple(kinds[i]), j: tuple(kinds[j])})
                kinds[i][a], kinds[j][b] = kinds[j][b], kinds[i][a]
        for i, at in places:
            for kind in self._unused(members):
                if kind != kinds[i][at]:
                    yield from self._recut(members, {i: (*kinds[i][:at], kind, *kinds[i][at + 1 :])})

    def _moved(self, members: Members) -> Iterator[Members]:
        """Yield members with a stage less, more, or in another member; and with a whole member less or more."""
        shorter: list[tuple[Members, dict[int, tuple[int, ...]], list[int]]] = [(members, {}, self._unused(members))]
        for i, each in enumerate(members):
            own = each.kinds if isinstance(each, Pipeline) else ()
            if len(members) > self._templates.problem.least_members and len(members) > 1:
                rest = (*members[:i], *members[i + 1 :])
                shorter.append((rest, {}, self._unused(rest)))
                yield rest
            for at in range(len(own) if len(own) > 1 else 0):
                less = {i: (*own[:at], *own[at + 1 :])}
                shorter.append((members, less, [own[at]]))
                yield from self._recut(members, less)
        for rest, less, free in shorter:
            yield from self._grown(rest, less, free)

    def _grown(self, members: Members, less: dict[int, tuple[int, ...]], free: Sequence[int]) -> Iterator[Members]:
        """Yield members with a further stage, or with a further member, of a free device."""
        for kind in dict.fromkeys(free):
            for i, each in enumerate(members):
                own = less.get(i, each.kinds if isinstance(each, Pipeline) else ())
                if 0 < len(own) < self._most_stages:
                    for at in range(len(own) + 1):
                        yield from self._recut(members, {**less, i: (*own[:at], kind, *own[at:])})
            if not less:
                yield from self._recut((*members, Pipeline((kind,), (), 0)), {len(members): (kind,)})
        if not less:
            number = Counter(free)
            need = tuple(number[kind] for kind in range(len(self._devices)))
            for template in self._options.further:
                if all(a <= b for a, b in zip(template.devices, need, strict=True)):
                    yield (*members, template)
            for kind in [kind for kind in number if number[kind] > 1 and self._most_stages > 1]:
                yield from self._recut((*members, Pipeline((kind, kind), (), 0)), {len(members): (kind, kind)})

    def _unused(self, members: Members) -> list[int]:
        left = list(self._devices)
        for member in members:
            for kind, count in (
                Counter(member.kinds).items() if isinstance(member, Pipeline) else enumerate(member.devices)
            ):
                left[kind] -= count
        return [kind for kind, count in enumerate(left) for _ in range(count)]

    def _recut(self, members: Members, kinds: dict[int, tuple[int, ...]]) -> Iterator[Members]:
        """Yield members with these kinds of devices instead, cut for time, as before, or as another member."""
        options: list[list[Choice]] = []
        for i, own in kinds.items():
            member = members[i]
            assert isinstance(member, Pipeline)  # noqa: S101  # the callers change no others
            edges = dict.fromkeys(self._edges(own, member.size))
            edges |= {m.edges: None for m in members if isinstance(m, Pipeline) and len(m.edges) == len(own) + 1}
            options.append([Pipeline(own, each, member.size) for each in edges])
        for chosen in itertools.product(*options):
            found = list(members)
            for i, each in zip(kinds, chosen, strict=True):
                found[i] = each
            yield tuple(found)

    def _edges(self, kinds: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
        """Return the edges with the least slowest stage that memory permits, for many and for few micro-batches."""
        if (kinds, size) not in self._cuts:
            found, costs = [], self.step.costs[size]
            for most in (costs.micro_batches, *_OTHER_LIMITS[: len(kinds) - 1]):
                key = (size, min(most, costs.micro_batches))
                if key not in self._limited:
                    self._limited[key] = replace(costs, micro_batches=key[1])
                stages = least_slowest(self._limited[key], kinds)
                found += [] if stages is None else [(0, *(end for _, _, end in stages))]
            self._cuts[kinds, size] = tuple(dict.fromkeys(found))
        return self._cuts[kinds, size]


def menu_has_pipelines(options: TemplateOptions) -> bool:
    """Return whether some options have members of several stages."""
    own = np.isfinite(options.first_BJ[:, : options.pipelines]).any(axis=0)
    return bool((options.need_JK[: options.pipelines][own].sum(axis=1) > 1).any())


def _most(options: TemplateOptions) -> float:
    return float(options.next_BJ[np.isfinite(options.next_BJ)].max())


def _shifted(members: Members) -> Iterator[Members]:
    """Yield members with one edge moved by a unit, in one member or in all that are cut there."""
    for edge in sorted({e for each in members if isinstance(each, Pipeline) for e in each.edges[1:-1]}):
        cut = [i for i, each in enumerate(members) if isinstance(each, Pipeline) and edge in each.edges[1:-1]]
        for to in (edge - 1, edge + 1):
            moved = {i: _with_edge(members[i], edge, to) for i in cut}
            for chosen in [*([i] for i in cut), *([cut] if len(cut) > 1 else [])]:
                if all(moved[i] is not None for i in chosen):
                    yield tuple(moved[i] or each if i in chosen else each for i, each in enumerate(members))


def _with_edge(member: Choice, edge: int, to: int) -> Pipeline | None:
    assert isinstance(member, Pipeline)  # noqa: S101  # sharded members have no edges
    edges = tuple(to if each == edge else each for each in member.edges)
    return replace(member, edges=edges) if len(set(edges)) == len(edges) else None


def _partitions(
    devices: Sequence[int], needs: Sequence[tuple[int, ...]], at_most: int | None = None
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the ways of forming at least one member, each of the given devices; some may be left over."""
    for index in range(len(needs) if at_most is None else at_most + 1):
        left = [have - need for have, need in zip(devices, needs[index], strict=True)]
        if min(left) >= 0:
            yield (needs[index],)
            for rest in _partitions(left, needs, index):
                yield (needs[index], *rest)
