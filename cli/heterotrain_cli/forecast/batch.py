"""The forecast of one batch over the members of a profile, by the operator's own split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract.plan import Binding
from heterotrain_core.split.balance import Infeasible
from heterotrain_planner.split.expected import balance_expected

from heterotrain_cli.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberForecast:
    """The part of one single member in each step."""

    name: str
    samples: int
    micro_batches: int
    binding: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """The forecast of one step; without a feasible division, only the reason has content.

    Attributes:
        feasible: whether the batch can be divided at all.
        reason: one sentence.
        step_s: predicted mean seconds of a step, with the noise of all members whose variation is known.
        quiet_step_s: the same without noise.
        samples_per_s: batch / step_s.
        efficiency: samples_per_s over the sum of solo rates; a solo rate is a share / its own compute time.
        members: one entry for each single member, in the profile's order.
    """

    feasible: bool
    reason: str
    step_s: float | None = None
    quiet_step_s: float | None = None
    samples_per_s: float | None = None
    efficiency: float | None = None
    members: tuple[MemberForecast, ...] = ()


def forecast_batch(profile: Profile, batch_samples: int) -> BatchForecast:
    """Return the forecast for a global batch of at least 1 sample."""
    names = [member.name for member in profile.members for _ in range(member.count)]
    curves = [member.curve for member in profile.members for _ in range(member.count)]
    variations = [member.variation or 0.0 for member in profile.members for _ in range(member.count)]
    found = balance_expected(batch_samples, curves, variations, communication=profile.communication)
    if isinstance(found, Infeasible):
        return BatchForecast(feasible=False, reason=with_name(found.reason, names))
    split, rate = found.split, batch_samples / found.expected_s
    rows = zip(names, split.shares, split.micro_batches, split.bindings, strict=True)
    return BatchForecast(
        feasible=True,
        reason=split.reason,
        step_s=found.expected_s,
        quiet_step_s=split.step_s,
        samples_per_s=rate,
        efficiency=rate / split.solo_samples_per_s,
        members=tuple(
            MemberForecast(name=name, samples=samples, micro_batches=micro, binding=binding)
            for name, samples, micro, binding in rows
        ),
    )


def as_document(found: BatchForecast) -> dict[str, Any]:
    """Return the forecast in the documented JSON form."""
    return {
        "feasible": found.feasible,
        "reason": found.reason,
        "stepSeconds": found.step_s,
        "stepSecondsWithoutNoise": found.quiet_step_s,
        "samplesPerSecond": found.samples_per_s,
        "efficiency": found.efficiency,
        "members": [
            {"name": m.name, "samples": m.samples, "microBatches": m.micro_batches, "binding": m.binding.value}
            for m in found.members
        ],
    }


def with_name(reason: str, names: Sequence[str]) -> str:
    """Return the core's reason, which counts members from 0, with the member's name."""
    return re.sub(
        r"^member (\d+)\b", lambda match: f"member {names[int(match[1])]} (number {int(match[1]) + 1})", reason
    )
