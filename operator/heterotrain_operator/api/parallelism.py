"""``spec.parallelism``: whether each process holds the whole model, or several hold it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from heterotrain_core.contract.choices import Parallelism
from pydantic import Field

from heterotrain_operator.api.schema import Model

PLANNED_MODES = frozenset({Parallelism.SHARDED_ACROSS_WORKERS, Parallelism.PIPELINE, Parallelism.AUTO})
"""Modes whose members are planned from what the workers measure of the model."""


class PoolLink(Model):
    """The bandwidth between workers of two pools."""

    between: tuple[Annotated[str, Field(min_length=1, max_length=40)], ...] = Field(
        min_length=2,
        max_length=2,
        description="Names of two pools, in either order; twice the same for two workers of one pool. "
        "Example: [a100, t4].",
    )
    mbit_per_second: int = Field(
        ge=1, le=100_000_000, description="Megabits per second between two workers of these pools. Example: 1000."
    )


class ParallelismSpec(Model):
    """How the model is divided among the processes of a job."""

    mode: Parallelism = Field(
        default=Parallelism.DATA,
        description="Data: each process holds the whole model. Sharded: the processes of a worker hold it together, "
        "and each worker gets one share of the batch; for models that fit no single accelerator. The script has to use "
        "job.wrap. ShardedAcrossWorkers: a member may consist of several workers of different memory and speed. Each "
        "process holds a part of the training state that suits its memory, and computes a part of the share that suits "
        "its speed. The script has to pass job.wrap a function, and to use step.compute and an elementwise optimizer "
        "such as AdamW. Pipeline: several workers may hold the model together, each some of its layers. The script has "
        "to pass job.wrap a function. In these two modes the workers measure the layers, and the operator decides "
        "which worker holds what. Auto: Data where the whole training state fits every device, else the faster of the "
        "two.",
    )
    link_mbit_per_second: int = Field(
        default=10_000,
        ge=1,
        le=100_000_000,
        description="In the modes that are planned (not Data and Sharded): megabits per second between two workers. "
        "Example: 10000.",
    )
    links: tuple[PoolLink, ...] = Field(
        default=(),
        max_length=64,
        description="In the modes that are planned: pairs of pools with another bandwidth, such as "
        "pools in two zones. Example: [{between: [a100, t4], mbitPerSecond: 1000}].",
    )

    @property
    def is_planned(self) -> bool:
        """Whether members are planned from what the workers measure of the model."""
        return self.mode in PLANNED_MODES

    @property
    def may_cut(self) -> bool:
        """Whether planned members may be pipelines."""
        return self.mode in (Parallelism.PIPELINE, Parallelism.AUTO)

    @property
    def may_shard(self) -> bool:
        """Whether planned members may be sharded over several workers."""
        return self.is_planned and self.mode is not Parallelism.PIPELINE


def problem_with_links(links: Sequence[PoolLink], pools: Sequence[str]) -> str:
    """Return in one sentence what is wrong with the links of a job with these pools; empty for nothing."""
    seen: set[frozenset[str]] = set()
    for link in links:
        if unknown := next((name for name in link.between if name not in pools), None):
            return (
                f"spec.parallelism.links names pool {unknown}, which is not in spec.workerPools: correct the name, or "
                "leave the link out"
            )
        pair = frozenset(link.between)
        if pair in seen:
            return f"spec.parallelism.links has the pair {', '.join(link.between)} twice: give it one bandwidth"
        seen.add(pair)
    return ""
