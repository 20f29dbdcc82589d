"""A scenario as people write it (``docs/simulation.md``), and the ones that ship with this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from heterotrain_simulator.baselines import AdaptiveEven, Even, Proportional
from heterotrain_simulator.buckets import MIB, Network
from heterotrain_simulator.cannikin import Cannikin
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import Policy
from heterotrain_simulator.scenario import Change, Elasticity, Group, Noise, Scenario, Slowdown, problems
from heterotrain_simulator.spot_traces import TRACES, as_changes
from heterotrain_simulator.workloads import PRICES_PER_HOUR, WORKLOADS

from heterotrain_cli.documents import STANDARD_INPUT, check_document, parse_document, place, read_document
from heterotrain_cli.errors import InputError

SCHEMA = "scenario"
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "even": Even,
    "adaptive-even": AdaptiveEven,
    "proportional": Proportional,
    "cannikin": Cannikin,
    "heterotrain": HeterotrainPolicy,
}
_FOREVER_S = 1e12
_BITS = 8
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A scenario with the policies and seeds that it is run for."""

    scenario: Scenario
    policies: tuple[str, ...]
    seeds: tuple[int, ...]


def shipped() -> dict[str, str]:
    """Return the scenarios that ship with this package: name to one sentence."""
    found = {}
    for file in sorted((resources.files("heterotrain_cli") / "scenarios").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            name = file.name.removesuffix(".yaml")
            found[name] = str(parse_document(file.read_text(encoding="utf-8"), where=name).get("description", ""))
    return found


def read_scenario(name_or_path: str) -> Comparison:
    """Return the shipped scenario of that name, else the one in that file.

    Raises:
        InputError: there is none, or it does not keep the schema or contradicts itself.
    """
    if name_or_path in shipped():
        text = (resources.files("heterotrain_cli") / "scenarios" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
        return scenario_of(parse_document(text, where=name_or_path), name=name_or_path, where=name_or_path)
    where = place(name_or_path)
    if name_or_path != STANDARD_INPUT and not Path(name_or_path).exists():
        raise InputError(f"{where}: is neither a file nor a shipped scenario: these are {', '.join(shipped())}")
    return scenario_of(read_document(name_or_path), name=name_or_path, where=where)


def scenario_of(document: Any, *, name: str, where: str) -> Comparison:
    """Return the comparison that a document describes; ``where`` names it in errors.

    Raises:
        InputError: it does not keep the schema or contradicts itself.
    """
    check_document(document, schema=SCHEMA, where=where)
    workload = WORKLOADS[document["workload"]]
    pauses, noise, end = (document.get(part, {}) for part in ("pauses", "noise", "end"))
    scenario = Scenario(
        name=name,
        workload=workload,
        groups=tuple(_group(raw) for raw in document["pools"]),
        network=_network(document.get("network", {})),
        gamma=float(document.get("gamma", 0.15)),
        bucket_bytes=float(document.get("bucketMiB", 25)) * MIB,
        noise=Noise(
            variation=float(noise.get("variation", 0.03)),
            correlation=float(noise.get("correlation", 0)),
            hiccup_probability=float(noise.get("hiccupProbability", 0)),
            hiccup_ratio=float(noise.get("hiccupRatio", 3)),
        ),
        slowdowns=tuple(_slowdown(raw) for raw in document.get("slowdowns", ())),
        changes=_changes(document),
        elasticity=Elasticity(
            loss_s=float(pauses.get("lossSeconds", 1)),
            join_s=float(pauses.get("joinSeconds", 1)),
            restart_s=float(pauses.get("restartSeconds", workload.restart_s)),
            start_s=float(pauses.get("startSeconds", 45)),
        ),
        batch_samples=int(document["batch"]),
        adaptive=bool(document.get("adaptive", False)),
        boundary_steps=int(document.get("boundarySteps", 0)),
        scrape_s=float(document.get("scrapeSeconds", 5)),
        min_gain_ratio=float(document.get("minGain", 0.01)),
        end_epochs=int(end.get("epochs", 0)),
        end_s=float(end.get("seconds", 0)),
    )
    if found := problems(scenario):
        raise InputError(f"{where}: {found[0]}")
    return Comparison(
        scenario=scenario,
        policies=tuple(dict.fromkeys(document.get("policies", POLICIES))),
        seeds=tuple(dict.fromkeys(int(seed) for seed in document.get("seeds", (1,)))),
    )


def _group(raw: Mapping[str, Any]) -> Group:
    price = raw.get("pricePerHour", PRICES_PER_HOUR.get(raw["gpu"], 0.0))
    return Group(
        pool=raw["name"],
        gpu=raw["gpu"],
        count=int(raw.get("count", 0 if "trace" in raw else 1)),
        price_per_hour=float(price),
    )


def _network(raw: Mapping[str, Any]) -> Network:
    line_bytes_per_s = float(raw.get("gigabitsPerSecond", 10)) * _GIGA / _BITS
    return Network(
        bytes_per_s=line_bytes_per_s * float(raw.get("efficiency", 0.8)),
        latency_s=float(raw.get("latencySeconds", 2e-5)),
    )


def _slowdown(raw: Mapping[str, Any]) -> Slowdown:
    return Slowdown(
        pool=raw["pool"],
        worker=raw.get("worker"),
        from_s=float(raw["fromSeconds"]),
        until_s=float(raw.get("untilSeconds", _FOREVER_S)),
        ratio=float(raw["ratio"]),
    )


def _changes(document: Mapping[str, Any]) -> tuple[Change, ...]:
    stated = [
        Change(
            pool=raw["pool"],
            at_s=float(raw["atSeconds"]),
            joined=int(raw.get("joined", 0)),
            lost=int(raw.get("lost", 0)),
        )
        for raw in document.get("changes", ())
    ]
    recorded = [
        change
        for raw in document["pools"]
        if "trace" in raw
        for change in as_changes(TRACES[raw["trace"]], raw["name"])
    ]
    return (*stated, *recorded)
