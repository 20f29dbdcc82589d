"""The forecast of one batch over the members of a profile, by the operator's own split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heterotrain_core.split.balance import Infeasible
from heterotrain_planner.split.expected import ExpectedSplit, balance_expected

from heterotrain_cli.profile import Profile


def forecast_batch(profile: Profile, batch_samples: int) -> ExpectedSplit | Infeasible:
    """Return the division of a global batch of at least 1 sample among the single members, in the profile's order."""
    curves = [member.curve for member in profile.members for _ in range(member.count)]
    variations = [member.variation or 0.0 for member in profile.members for _ in range(member.count)]
    found = balance_expected(batch_samples, curves, variations, communication=profile.communication)
    return replace(found, reason=with_name(found.reason, _names(profile))) if isinstance(found, Infeasible) else found


def as_document(profile: Profile, batch_samples: int, found: ExpectedSplit | Infeasible) -> dict[str, Any]:
    """Return the forecast in the documented JSON form; ``efficiency`` is samples/s over the sum of solo rates."""
    if isinstance(found, Infeasible):
        figures = dict.fromkeys(("stepSeconds", "stepSecondsWithoutNoise", "samplesPerSecond", "efficiency"))
        return {"feasible": False, "reason": found.reason, **figures, "members": []}
    split, rate = found.split, batch_samples / found.expected_s
    rows = zip(_names(profile), split.shares, split.micro_batches, split.bindings, strict=True)
    return {
        "feasible": True,
        "reason": split.reason,
        "stepSeconds": found.expected_s,
        "stepSecondsWithoutNoise": split.step_s,
        "samplesPerSecond": rate,
        "efficiency": rate / split.solo_samples_per_s,
        "members": [
            {"name": name, "samples": samples, "microBatches": micro, "binding": binding.value}
            for name, samples, micro, binding in rows
        ],
    }


def _names(profile: Profile) -> list[str]:
    return [member.name for member in profile.members for _ in range(member.count)]


def with_name(reason: str, names: Sequence[str]) -> str:
    """Return the core's reason, which counts members from 0, with the member's name."""
    return re.sub(
        r"^member (\d+)\b", lambda match: f"member {names[int(match[1])]} (number {int(match[1]) + 1})", reason
    )
