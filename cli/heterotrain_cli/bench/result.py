"""Speed-up, efficiency and a profile from the measurements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract.keys import MOST_SIZES
from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.exchange import fit_exchange
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.perf.model import FitQuality

from heterotrain_cli.bench.ranks import samples_per_s, step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One number of workers.

    Attributes:
        workers: ranks that trained together.
        batch_samples: the global batch.
        step_s: mean seconds of a step.
        samples_per_s: throughput of all workers.
        speed_up: throughput over that of one worker.
        efficiency: ``speed_up / workers``, the scaling efficiency.
    """

    workers: int
    batch_samples: int
    step_s: float
    samples_per_s: float
    speed_up: float
    efficiency: float


def table(runs: Sequence[tuple[int, int, Sequence[Observation]]]) -> list[ScalingRow]:
    """Return a row for each run of (workers, global batch, observations); the first one has one worker."""
    alone = samples_per_s(runs[0][2])
    found = []
    for workers, batch_samples, observations in runs:
        rate = samples_per_s(observations)
        speed_up = rate / alone if alone > 0 else 0.0
        found.append(
            ScalingRow(
                workers=workers, batch_samples=batch_samples, step_s=step_s(observations), samples_per_s=rate,
                speed_up=speed_up, efficiency=speed_up / workers,
            )
        )  # fmt: skip
    return found


def as_document(row: ScalingRow) -> dict[str, Any]:
    """Return the row with the names that documents have."""
    return {
        "workers": row.workers, "batchSamples": row.batch_samples, "stepSeconds": row.step_s,
        "samplesPerSecond": row.samples_per_s, "speedUp": row.speed_up, "efficiency": row.efficiency,
    }  # fmt: skip


def profile(
    name: str, solo: Sequence[Sequence[Observation]], together: Sequence[tuple[int, Sequence[Observation]]]
) -> tuple[dict[str, Any] | None, str]:
    """Return the profile that ``heterotrain forecast`` reads, and how well it is known; ``None`` if it is unknown.

    Times and variation of a worker come from steps of one worker alone: on a shared machine, several slow each other
    down.

    Args:
        name: of the member; in a forecast of a job, the name of a pool.
        solo: observations of one worker alone, for several batches.
        together: several workers at once: their number and observations, the largest number last. The profile has so
            many members.
    """
    everything = [each for run in solo for each in run]
    model = fit_member(everything)
    if model.compute is None or model.quality is FitQuality.DEGENERATE:
        return None, model.reason
    c = model.compute
    spread = any(each.compute is not None and each.compute.variance is not None for each in everything)
    fitted = [(workers, fit_exchange(list(found)).communication) for workers, found in together]
    exchanges = [(workers, found) for workers, found in fitted if found is not None]
    member = {
        "name": name,
        "count": together[-1][0] if together else 1,
        "perSampleSeconds": c.per_sample_s,
        "fixedSeconds": c.fixed_s + c.update_s,
        "backwardPerSampleSeconds": c.backward_per_sample_s,
        "backwardFixedSeconds": c.backward_fixed_s,
    } | ({"variation": min(1.0, round(model.variation, 4))} if spread else {})
    communication: dict[str, Any] = {}
    if exchanges:
        largest, exchange = exchanges[-1]
        others = [
            {"ranks": ranks, "seconds": smaller.overlapped_s + smaller.last_bucket_s, "oneWorker": True}
            for ranks, smaller in exchanges[:-1]
            if smaller.overlapped_s + smaller.last_bucket_s > 0
        ]
        communication = (
            {
                "overlappedSeconds": exchange.overlapped_s,
                "lastBucketSeconds": exchange.last_bucket_s,
                "gamma": exchange.gamma,
                "ranks": largest,
                "oneWorker": True,  # all of them on this machine
            }
            | ({"otherSizes": others[-(MOST_SIZES - 1) :]} if others else {})
        )
    return {"description": f"measured by heterotrain bench: {model.reason}"} | (
        {"communication": communication} if communication else {}
    ) | {"members": [member]}, model.reason
