"""One template of a cover, worked out: its layout with simulated passes, and the time of a share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from heterotrain_core.contract.plan import ComputeTime

from heterotrain_planner.layout.costs import Costs
from heterotrain_planner.layout.cut import finalists, layout_of, slowest_with_room
from heterotrain_planner.layout.level import TemplateOptions
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout
from heterotrain_planner.layout.schedule import passes, share_seconds
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.update import update_seconds

NOTICED_UPDATE = 0.02
"""Part of a share above which the update counts where the model is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedOut:
    """The best layout of a template for a share near the expected one.

    Attributes:
        layout: what each device holds.
        others: layouts of the same devices whose share takes little longer; their exchange may be shorter.
        micro_batch_samples: of one micro-batch.
        most_micro_batches: of a share, as the memory of the stages is planned for.
        roomy_slowest_s: seconds of the slowest stage if memory were no limit.
        update_s: seconds of the update, once a step.
        curve: the time of a share, for the split; the update included.
    """

    layout: DeviceLayout
    others: tuple[DeviceLayout, ...] = ()
    micro_batch_samples: int
    most_micro_batches: int
    roomy_slowest_s: float
    update_s: float
    curve: ComputeTime

    def seconds(self, micro_batches: int) -> float:
        """Return the simulated seconds of a share, and of the update."""
        if self.layout.stages:
            return share_seconds(passes(self.layout.stages), micro_batches) + self.update_s
        return self.curve.update_s + self.curve.per_sample_s * micro_batches * self.micro_batch_samples

    def time_of(self, micro_batches: int, seconds: float) -> ComputeTime:
        """Return the time of a share that takes so long: its slowest stage for each sample, and what is left once."""
        samples = self.micro_batch_samples
        stages = self.layout.stages
        slowest_s = max(stage.busy_s for stage in stages) if stages else self.curve.per_sample_s * samples
        return curve_of(slowest_s / samples, max(0.0, seconds - micro_batches * slowest_s))

    def with_layout(self, problem: Problem, layout: DeviceLayout) -> WorkedOut:
        """Return the same template with another cut."""
        return replace(self, layout=layout, update_s=update_seconds(problem, layout))


def work_out(
    templates: TemplateTable, options: TemplateOptions, row: int, column: int, micro_batches: int
) -> WorkedOut:
    """Return a template with its layout and the simulated time of a share.

    Args:
        templates: the templates.
        options: with this template.
        row: index of its size of micro-batch.
        column: its index in the options.
        micro_batches: of the share.
    """
    samples, most = int(options.samples_BJ[row, column]), int(options.most_BJ[row, column])
    if column >= options.pipelines:
        template = options.further[column - options.pipelines]
        update_s = update_seconds(templates.problem, template.layout)
        return WorkedOut(
            layout=template.layout,
            micro_batch_samples=samples,
            most_micro_batches=most,
            roomy_slowest_s=template.next_s,
            update_s=update_s,
            curve=curve_of(template.next_s / samples, template.first_s - template.next_s + update_s),
        )
    costs = templates.costs[row]
    devices = options.need_JK[column].tolist()
    cuts = finalists(costs, devices, micro_batches)
    layouts = [layout_of(templates.problem, costs, each.stages) for each in cuts]
    if update_seconds(templates.problem, layouts[0]) > NOTICED_UPDATE * cuts[0].share_s(micro_batches):
        more = finalists(_with_updates(templates.problem, costs, micro_batches), devices, micro_batches)
        layouts += [layout_of(templates.problem, costs, each.stages) for each in more]
    times = [
        share_seconds(passes(each.stages), micro_batches) + update_seconds(templates.problem, each) for each in layouts
    ]
    layout = layouts[times.index(min(times))]
    slowest_s = max(stage.busy_s for stage in layout.stages)
    return WorkedOut(
        layout=layout,
        others=tuple(dict.fromkeys(each for each in layouts if each != layout)),
        micro_batch_samples=samples,
        most_micro_batches=most,
        roomy_slowest_s=slowest_with_room(costs, devices),
        update_s=update_seconds(templates.problem, layout),
        # No schedule is shorter than the work of the slowest stage.
        curve=curve_of(slowest_s / samples, max(0.0, min(times) - micro_batches * slowest_s)),
    )


def _with_updates(problem: Problem, costs: Costs, micro_batches: int) -> Costs:
    """Return costs whose backward passes take their part of the update, as if it were made a little at a time.

    The slowest stage of a share of many micro-batches then has its whole update. Where memory and links permit, stages
    with slow updates become smaller.
    """
    rate_K = np.array([kind.update_s_per_byte for kind in problem.kinds])
    return replace(costs, backward_KE=costs.backward_KE + rate_K[:, None] * costs.parameter_E / micro_batches)


def curve_of(per_sample_s: float, fixed_s: float) -> ComputeTime:
    """Return the time of a share: so much for each sample, and so much once."""
    return ComputeTime(
        per_sample_s=per_sample_s, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0, update_s=fixed_s
    )
