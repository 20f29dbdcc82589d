"""A job's forecast from the files to the printed report."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from heterotrain_core.contract.plan import Prediction
from heterotrain_operator.api.reading import SpecError, read_spec
from rich.console import Console

from heterotrain_cli.cluster.target import Target
from heterotrain_cli.documents import place, read_document
from heterotrain_cli.errors import InputError
from heterotrain_cli.forecast.allocations import AllocationForecast, JobForecast, forecast_job
from heterotrain_cli.forecast.cluster import RunningJob, exchange, read_running_job, with_measured_speeds
from heterotrain_cli.forecast.job import JobInput, job_of, read_job, with_profile
from heterotrain_cli.forecast.tables import bindings, headline, noise_line
from heterotrain_cli.profile import Profile
from heterotrain_cli.terminal import plain_table, say, spread

_SHOWN_ALTERNATIVES = 8
_EQUAL = 1e-6
"""Gains below it are not stated: rates are known less exactly."""
_WHOLE_TENTHS = 100
"""Gains of so many tenths of a per cent are stated in whole per cent."""
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""A job's name; a file's name usually has a dot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A job with its forecast.

    Attributes:
        job: with its speeds.
        forecast: the answer.
        samples_per_epoch: size of the data set, ``None`` if not given.
        running: the running job, ``None`` with a profile.
    """

    job: JobInput
    forecast: JobForecast
    samples_per_epoch: int | None
    running: RunningJob | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The forecast in the documented JSON form."""
        outcome = self.forecast.preferred
        return {
            "job": self.job.name,
            "batch": self.job.batch_samples,
            "feasible": self.forecast.feasible,
            "reason": self.forecast.reason,
            **(self._figures(outcome) if outcome else {"stepSeconds": None}),
            "measuredStepSeconds": self.running.measured_step_s if self.running else None,
            "plannedStepSeconds": self._prediction.step_s if self._prediction else None,
            "efficiencyCeiling": self._prediction.efficiency_ceiling if self._prediction else None,
            "unknownPools": [pool.name for pool in self.job.pools if pool.rank is None],
            "comparedAllocations": self.forecast.compared,
            "comparedAll": self.forecast.complete,
            "mostSpeedGain": _stated(self.forecast.speed_gain),
            "mostCostGain": _stated(self.forecast.cost_gain),
            "alternatives": [self._figures(other) for other in self.forecast.alternatives],
        }

    @property
    def _prediction(self) -> Prediction | None:
        """The prediction of the plan in force for its own members and shares, noise included."""
        return self.running.plan.prediction if self.running else None

    def _figures(self, outcome: AllocationForecast) -> dict[str, Any]:
        return {
            "stepSeconds": outcome.step_s,
            "stepSecondsWithoutNoise": outcome.quiet_step_s,
            "samplesPerSecond": outcome.samples_per_s,
            "efficiency": outcome.efficiency,
            "evenStepSeconds": outcome.even_step_s,
            "pricePerHour": outcome.price_per_hour,
            "costPerMillionSamples": outcome.cost_per_million,
            "costPerEpoch": self._cost(outcome, self.samples_per_epoch),
            "secondsPerEpoch": None
            if self.samples_per_epoch is None
            else self.samples_per_epoch / outcome.samples_per_s,
            "secondsInAll": None if self._samples is None else self._samples / outcome.samples_per_s,
            "costInAll": self._cost(outcome, self._samples),
            "pools": [
                {
                    "name": pool.name,
                    "workers": pool.workers,
                    "ranks": pool.ranks,
                    "samplesPerRank": list(pool.samples),
                    "microBatches": pool.micro_batches,
                    "partOfBatch": pool.part,
                    "variation": pool.variation,
                    "bindings": {binding.value: count for binding, count in pool.bindings},
                    "pricePerHour": pool.price_per_hour,
                }
                for pool in outcome.pools
            ],
        }

    @property
    def _samples(self) -> int | None:
        """Samples of the whole training; ``None`` while the length of an epoch is unknown."""
        if self.job.steps is not None:
            return self.job.steps * self.job.batch_samples
        return None if self.samples_per_epoch is None else self.job.epochs * self.samples_per_epoch

    def _cost(self, outcome: AllocationForecast, samples: int | None) -> float | None:
        if samples is None or outcome.cost_per_million is None:
            return None
        return outcome.cost_per_million * samples / 1e6

    def show(self, console: Console) -> None:
        """Print the forecast as text."""
        outcome = self.forecast.preferred
        if outcome is None:
            say(console, f"not possible: {self.forecast.reason}")
        else:
            figures = headline(self.job.batch_samples, outcome.step_s, outcome.samples_per_s, outcome.efficiency)
            say(console, f"{self.job.name}: {figures}")
            say(console, noise_line(outcome.step_s, outcome.quiet_step_s, [pool.variation for pool in outcome.pools]))
            self._show_pools(console, outcome)
            self._show_comparison(console, outcome)
        if unknown := [pool.name for pool in self.job.pools if pool.rank is None]:
            say(console, f"left out, because their speed is unknown: {', '.join(unknown)}")
        self._show_alternatives(console)

    def _show_pools(self, console: Console, outcome: AllocationForecast) -> None:
        table = plain_table("pool")
        for heading in ("workers", "ranks", "each", "micro", "of batch", "an hour"):
            table.add_column(heading, justify="right")
        table.add_column("binding", no_wrap=True)
        for pool in outcome.pools:
            table.add_row(
                pool.name,
                str(pool.workers),
                str(pool.ranks),
                spread(pool.samples),
                str(pool.micro_batches),
                f"{pool.part:.1%}",
                _money(pool.price_per_hour),
                bindings(pool.bindings),
            )
        console.print(table)

    def _show_comparison(self, console: Console, outcome: AllocationForecast) -> None:
        if outcome.even_step_s is None and not self.job.even:
            say(console, "even shares are not possible: a rank cannot take its part")
        elif outcome.even_step_s is not None and not self.job.even:
            longer = outcome.even_step_s / outcome.step_s
            say(console, f"even shares: {outcome.even_step_s:.4g} s, {longer:.2f} times as long")
        if self._prediction is not None:
            say(
                console,
                f"the plan in force predicts {self._prediction.step_s:.4g} s for its members, noise included; "
                f"the ceiling of its efficiency is {self._prediction.efficiency_ceiling:.3f}",
            )
        if self.running and self.running.measured_step_s is not None:
            say(console, f"measured now, with its present members: {self.running.measured_step_s:.4g} s")
        if self.samples_per_epoch is not None:
            span = _span(self.samples_per_epoch / outcome.samples_per_s)
            say(console, f"an epoch of {self.samples_per_epoch} samples: {span}")
        if self._samples is not None and (self.job.steps or self.job.epochs > 1):
            paid = self._cost(outcome, self._samples)
            what = f"{self.job.epochs} epochs" if self.job.steps is None else f"{self.job.steps:,} steps"
            span = _span(self._samples / outcome.samples_per_s)
            say(console, f"the training of {what}: {span}" + ("" if paid is None else f", {_money(paid)}"))
        if outcome.price_per_hour is None:
            say(console, "no cost: a pool has no pricePerHour")
            return
        cost = f"{outcome.price_per_hour:.2f} an hour, {_money(outcome.cost_per_million)} for a million samples"
        epoch = self._cost(outcome, self.samples_per_epoch)
        more = (
            "; --samples-per-epoch gives the cost of an epoch" if epoch is None else f", {_money(epoch)} for an epoch"
        )
        say(console, cost + more)

    def _show_alternatives(self, console: Console) -> None:
        if not self.forecast.alternatives:
            return
        chosen = self.forecast.preferred
        rows = _spread(self.forecast.alternatives, _SHOWN_ALTERNATIVES)
        if chosen is not None and all(other.allocation != chosen.allocation for other in rows):
            rows = sorted([*rows, chosen], key=lambda other: -other.samples_per_s)
        own = "" if chosen is None else " (* is the job's own)"
        others = "no other one" if self.forecast.complete else f"none of {self.forecast.compared} compared ones"
        say(console, f"allocations that {others} beats in both speed and price{own}:")
        table = plain_table("")
        for pool in self.job.pools:
            table.add_column(pool.name, justify="right")
        what = "an epoch" if self.samples_per_epoch is not None else "a million samples"
        for heading in ("step", "samples/s", "efficiency", "an hour", what):
            table.add_column(heading, justify="right")
        for other in rows:
            cost = (
                self._cost(other, self.samples_per_epoch)
                if self.samples_per_epoch is not None
                else other.cost_per_million
            )
            table.add_row(
                "*" if chosen is not None and other.allocation == chosen.allocation else "",
                *(str(workers) for workers in other.allocation),
                f"{other.step_s:.4g} s",
                f"{other.samples_per_s:.4g}",
                f"{other.efficiency:.3f}",
                _money(other.price_per_hour),
                _money(cost),
            )
        console.print(table)
        if line := self._distance_line():
            say(console, line)

    def _distance_line(self) -> str:
        """How far the best rows are from the best possible; empty where no allocation is better for certain."""
        gains = [("fastest", self.forecast.speed_gain), ("cheapest", self.forecast.cost_gain)]
        known = [(which, gain) for which, gain in gains if gain is not None]
        if not any(gain for _, gain in known):
            return ""
        return "; ".join(f"the {which} one: {_from_best(gain)}" for which, gain in known)


def report_from_profile(path: str, profile_path: str, *, batch: int | None, samples_per_epoch: int | None) -> JobReport:
    """Return the forecast of a job with the speeds of a profile.

    Raises:
        InputError: a file cannot be used, or the two do not match.
    """
    profile = read_document(profile_path, Profile)
    job = with_profile(_with_batch(read_job(path), batch), profile, where=place(profile_path))
    forecast = forecast_job(job, profile.measured_exchange)
    return JobReport(job=job, forecast=forecast, samples_per_epoch=samples_per_epoch)


def report_from_cluster(path: str, *, target: Target, batch: int | None, samples_per_epoch: int | None) -> JobReport:
    """Return the forecast of a job with the measured speeds of the running job of the same name.

    Args:
        path: of a file, or the name of the running job, which is then forecast as it is.
        target: cluster and namespace of the running job; without a namespace that of the file, or of the context.
        batch: another global batch in samples.
        samples_per_epoch: size of the data set.

    Raises:
        InputError: the file or the running job's plan cannot be used.
        UnavailableError: the cluster or the job is not available.
    """
    if _NAME.fullmatch(path) and not Path(path).is_file():
        found = read_running_job(path, target=target)
        where = f"job {path}"
        try:
            spec = read_spec(found.body)
        except SpecError as error:
            raise InputError(f"{where}: {error}") from error
        written = job_of(spec, name=path, namespace=target.namespace, body=found.body, where=where)
    else:
        written = read_job(path)
        found = read_running_job(written.name, target=replace(target, namespace=target.namespace or written.namespace))
    return report_of_running(written, found, batch=batch, samples_per_epoch=samples_per_epoch)


def report_of_running(
    job: JobInput, found: RunningJob, *, batch: int | None, samples_per_epoch: int | None
) -> JobReport:
    """Return the forecast of a job with the measured speeds of a running one.

    Raises:
        InputError: no pool has a measured speed yet.
    """
    written = _with_batch(job, batch)
    if written.adaptive and batch is None:
        written = _with_batch(written, found.plan.global_batch_samples)
    job = with_measured_speeds(written, found)
    forecast = forecast_job(job, exchange(found))
    return JobReport(job=job, forecast=forecast, samples_per_epoch=samples_per_epoch, running=found)


def _with_batch(job: JobInput, batch: int | None) -> JobInput:
    return job if batch is None else replace(job, batch_samples=batch)


def _spread(outcomes: tuple[AllocationForecast, ...], count: int) -> list[AllocationForecast]:
    """Return at most ``count`` of them: the first, the last, and others at even distances."""
    if len(outcomes) <= count:
        return list(outcomes)
    return [outcomes[round(i * (len(outcomes) - 1) / (count - 1))] for i in range(count)]


def _from_best(gain: float) -> str:
    """Return how much better than a row any allocation can be, in words, rounded up."""
    if gain < _EQUAL:
        return "no allocation is better"
    if gain > 1.0:
        return "no useful bound on the best possible is known"
    tenths = math.ceil(1000 * gain - 1e-9)
    percent = f"{tenths / 10:.1f}" if tenths < _WHOLE_TENTHS else f"{math.ceil(tenths / 10)}"
    return f"at most {percent} % from the best possible"


def _stated(gain: float | None) -> float | None:
    return gain if gain is not None and math.isfinite(gain) else None


def _money(amount: float | None) -> str:
    if amount is None:
        return "–"
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.3g}"


def _span(seconds: float) -> str:
    """Return a time span with its unit."""
    for unit_s, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {name}"
    return f"{seconds:.1f} s"
