"""One template of a cover, worked out: its layout with simulated passes, and the time of a share."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.layout.book import Book
from heterotrain_core.layout.cut import finalists, layout_of, slowest_with_room
from heterotrain_core.layout.level import Menu
from heterotrain_core.layout.result import Layout
from heterotrain_core.layout.schedule import passes, share_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedOut:
    """The best layout of a template for a share near the expected one.

    Attributes:
        layout: what each device holds.
        others: layouts of the same devices whose share takes little longer; their exchange may be shorter.
        micro_batch_samples: of one micro-batch.
        least_micro_batches: of a share.
        gap_ratio: how much shorter the share could at most be with another cut.
        roomy_slowest_s: seconds of the slowest stage if memory were no limit.
        curve: the time of a share, for the split.
    """

    layout: Layout
    others: tuple[Layout, ...] = ()
    micro_batch_samples: int
    least_micro_batches: int
    gap_ratio: float
    roomy_slowest_s: float
    curve: ComputeTime

    def seconds(self, micro_batches: int) -> float:
        """Return the simulated seconds of a share."""
        if self.layout.stages:
            return share_seconds(passes(self.layout.stages), micro_batches)
        return self.curve.update_s + self.curve.per_sample_s * micro_batches * self.micro_batch_samples


def work_out(book: Book, menu: Menu, row: int, column: int, micro_batches: int) -> WorkedOut:
    """Return a template with its layout and the simulated time of a share.

    Args:
        book: the templates.
        menu: with this template.
        row: index of its size of micro-batch.
        column: its index in the menu.
        micro_batches: of the share.
    """
    samples = int(menu.samples_BJ[row, column])
    least = int(menu.least_BJ[row, column])
    if column >= menu.multisets:
        template = menu.further[column - menu.multisets]
        return WorkedOut(
            layout=template.layout,
            micro_batch_samples=samples,
            least_micro_batches=least,
            gap_ratio=0.0,
            roomy_slowest_s=template.next_s,
            curve=curve_of(template.next_s / samples, template.first_s - template.next_s),
        )
    costs = book.costs[row]
    devices = menu.need_JK[column].tolist()
    cuts = finalists(costs, devices, micro_batches)
    layouts = [layout_of(book.problem, costs, each.stages) for each in cuts]
    times = [share_seconds(passes(each.stages), micro_batches) for each in layouts]
    layout = layouts[times.index(min(times))]
    slowest_s = max(stage.busy_s for stage in layout.stages)
    return WorkedOut(
        layout=layout,
        others=tuple(each for each in layouts if each != layout),
        micro_batch_samples=samples,
        least_micro_batches=least,
        gap_ratio=cuts[0].gap_ratio,
        roomy_slowest_s=slowest_with_room(costs, devices),
        # No schedule is shorter than the work of the slowest stage.
        curve=curve_of(slowest_s / samples, max(0.0, min(times) - micro_batches * slowest_s)),
    )


def curve_of(per_sample_s: float, fixed_s: float) -> ComputeTime:
    """Return the time of a share: so much for each sample, and so much once."""
    return ComputeTime(
        per_sample_s=per_sample_s, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0, update_s=fixed_s
    )
