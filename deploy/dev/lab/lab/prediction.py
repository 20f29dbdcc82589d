"""`make bench-prediction`: how well step times of shares that were never used are predicted, on the real cluster.

A job on the three pools learns for one epoch as any job does. Then the operator is switched off, so that plans can be
written by hand: five, each with a global batch that the job has not had before, and each with two vectors of shares that
take turns every few steps: those that the operator would choose, and others. Both are predicted before either is applied,
by the code that the operator runs on the counters that it reads, and measured over all of their turns. Two predictions:
from all that was seen up to then, as the operator would say it, and from the learning epoch alone. Between their turns
the shares of the learning epoch's end come back, which were used before: "at its pace" is the first prediction times
their measured over their predicted time, so the step time relative to shares that are known.

What of a miss is whose: beside each mean stands its own standard error, from the means between scrapes and their
correlation in time (the yardstick's part). Turns are a few seconds, so that whatever slows the machine for longer slows all of
them alike; so ratios are free of drift, and how far those are off is the model's part.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Boundary, BoundaryKind, Plan
from heterotrain_core.perf.counters import Observation
from heterotrain_core.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from heterotrain_core.split.proportion import in_proportion

from lab.cluster import REPOSITORY, Cluster, ClusterError, wait_for
from lab.demo import prepare, start
from lab.install import OPERATOR_NAMESPACE, install, rollout, this_cluster
from lab.jobs import Job
from lab.live_view import Live
from lab.prediction_errors import Row, show
from lab.scrapes import Scrapes, mean_with_error, name_of
from lab.telemetry import Prometheus

BATCH = 480
LEARNING_STEPS = 24
"""Steps of the epoch from which the job learns."""
BATCHES = (336, 672, 560, 400, 768)
"""Global batches after that, none of them used before; each has optimal shares and others."""
ROUNDS = 20
"""So many times, unless told otherwise, the known shares and the others: first the ones, then the others, then the other way round,"""
MEASURED_STEPS = 4
"""for at least so many steps with each vector of shares,"""
TURN_STEPS = 4
"""so many of them in a row."""
TURNS = 10
"""More than an epoch has; each epoch begins with the first vector."""
STRAY = 0.35
"""By how much shares are off from optimal ones, up or down, in the second vector."""
STAY = 1e9
"""A gain that no change of shares promises: the decision keeps the shares it is asked about, and predicts them."""


def main() -> int:
    """Run the series, print the table, and write it to ``--out``; 1 with one sentence when something does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/prediction")
    parser.add_argument("--seed", type=int, default=1, help="of the shares that are not optimal")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"of known and new shares, for each batch ({ROUNDS})"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds has to be at least 1, not {arguments.rounds}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the operator has to be switched on again in any case
    try:
        cluster = this_cluster("prediction")
        install(cluster)
        rows = measure(cluster, random.Random(arguments.seed), rounds=arguments.rounds)  # noqa: S311  # no secret
    except (ClusterError, AssertionError) as error:
        print(f"prediction: {error}", file=sys.stderr)
        return 1
    show(rows, arguments.out)
    return 0


def measure(cluster: Cluster, chance: random.Random, *, rounds: int) -> list[Row]:
    """Let a job learn for one epoch and measure the plans that follow; the operator runs again afterwards."""
    prepare(cluster)
    job = start(
        cluster,
        "prediction",
        {"epochs": 1000, "globalBatchSize": BATCH},
        ["--samples-per-epoch", str(LEARNING_STEPS * BATCH)],
        {"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}},
    )
    scrapes = Scrapes(Prometheus(cluster), job.uid(), known_s=time.time())
    try:
        with Live(job):
            job.wait_epoch(1, timeout_s=300)
        switch(cluster, replicas=0)
        scrapes.look(until_s=time.time())
        plan = job.plan()
        if plan is None:
            raise ClusterError("the job has no plan")
        known = plan.shares
        early = scrapes.evidence(plan)
        rows: list[Row] = []
        for batch in BATCHES:
            now = scrapes.evidence(plan)
            vectors = (best_shares(batch, now), stray_shares(batch, now, chance))
            predicted = [(predict(shares, now), predict(shares, early)) for shares in vectors]
            known_s = predict(known, now)
            plan, seen = in_turns(cluster, job, scrapes, plan, (*vectors, known), rounds=rounds)
            pace_ratio = mean_with_error(seen[-1])[0] / known_s
            print(f"known shares {known}: {pace_ratio:.3f} times as long as predicted", flush=True)
            for shares, (predicted_s, early_s), told in zip(vectors, predicted, seen, strict=False):
                measured_s, error_s = mean_with_error(told)
                rows.append(
                    Row(
                        shares=shares,
                        predicted_s=predicted_s,
                        early_s=early_s,
                        measured_s=measured_s,
                        error_s=error_s,
                        pace_ratio=pace_ratio,
                    )
                )
                print(
                    f"{shares}: predicted {predicted_s:.3f} s, measured {measured_s:.3f} s ± {error_s:.3f} s",
                    flush=True,
                )
        return rows
    finally:
        switch(cluster, replicas=1)
        cluster.delete(keys.PLURAL, job.name)


def stray_shares(batch_samples: int, evidence: Sequence[MemberEvidence], chance: random.Random) -> tuple[int, ...]:
    """Return shares that are off from the optimal ones by up to ``STRAY``."""
    stray = [share * chance.uniform(1 - STRAY, 1 + STRAY) for share in best_shares(batch_samples, evidence)]
    return in_proportion(batch_samples, [round(1000 * share) for share in stray])


def in_turns(
    cluster: Cluster, job: Job, scrapes: Scrapes, plan: Plan, vectors: Sequence[tuple[int, ...]], *, rounds: int
) -> tuple[Plan, list[Mapping[str, Sequence[Observation]]]]:
    """Let the last vector and the others, which are of one batch, come until all have made enough steps, in rounds.

    The order is ABBA, so that what grows or shrinks meanwhile hits both alike.

    Returns the plan in force and, for each vector, what members did with it between any two scrapes: those members whose
    share tells it from the other vectors and from the plan before.
    """
    names = [name_of(member.worker_uid, member.local_rank) for member in plan.members]
    used = [*vectors, plan.shares, *plan.probe]
    telling = [
        {
            name: share
            for rank, (name, share) in enumerate(zip(names, shares, strict=True))
            if all(share != other[rank] for other in used if other != shares)
        }
        for shares in vectors
    ]
    begun = len(scrapes.seen)
    in_force: Sequence[tuple[int, ...]] = ()

    def told() -> list[Mapping[str, Sequence[Observation]]]:
        scrapes.look(until_s=time.time())
        fresh = [o for o in scrapes.seen[begun:] if o.step is not None]
        return [
            {name: [o for o in fresh if (o.member, o.share_samples) == (name, share)] for name, share in mine.items()}
            for mine in telling
        ]

    def steps_of(turns: Sequence[tuple[int, ...]]) -> float:
        """Return how many steps the vector of these that has made fewest has made; infinity where nobody can tell."""
        mine = [seen for shares, seen in zip(vectors, told(), strict=True) if shares in turns]
        return min((sum(o.steps for o in each) for seen in mine for each in seen.values()), default=math.inf)

    def apply(turns: Sequence[tuple[int, ...]]) -> None:
        """Bring shares into force, and return when each vector of them has made enough further steps."""
        nonlocal plan, in_force
        if turns != in_force:
            plan, in_force = turning(plan, turns), turns
            write(cluster, job, plan)
        steps = steps_of(turns) + MEASURED_STEPS
        wait_for(
            lambda: steps_of(turns) >= steps, f"{steps:.0f} steps with each of {turns}", timeout_s=300, every_s=0.5
        )

    sides = (vectors[-1:], vectors[:-1])
    for number in range(rounds):
        for turns in reversed(sides) if number % 2 else sides:
            apply(turns)
    return plan, told()


def turning(plan: Plan, vectors: Sequence[tuple[int, ...]]) -> Plan:
    """Return the next plan, under which these shares, all of one batch, take turns."""
    return replace(
        plan,
        revision=plan.revision + 1,
        global_batch_samples=sum(vectors[0]),
        members=tuple(replace(m, share_samples=share) for m, share in zip(plan.members, vectors[0], strict=True)),
        boundary=Boundary(kind=BoundaryKind.STEPS, every_steps=2),
        probe=tuple(vectors[turn % len(vectors)] for turn in range(TURNS)) if len(vectors) > 1 else (),
        probe_steps=TURN_STEPS if len(vectors) > 1 else 0,
        prediction=None,
        reason="shares to be measured",
    )


def predict(shares: tuple[int, ...], evidence: Sequence[MemberEvidence]) -> float:
    """Return the seconds of a step with these shares that the operator would write into its plan."""
    decision = _decided(sum(shares), evidence, current=shares)
    if decision.division.shares != shares or decision.division.prediction is None:
        raise ClusterError(f"no prediction for shares {shares}: {decision.reason}")
    return decision.division.prediction.step_s


def best_shares(batch_samples: int, evidence: Sequence[MemberEvidence]) -> tuple[int, ...]:
    """Return the shares that the operator would choose."""
    return _decided(batch_samples, evidence, current=None).division.shares


def _decided(
    batch_samples: int, evidence: Sequence[MemberEvidence], *, current: tuple[int, ...] | None
) -> SharesDecision:
    decision = decide_shares(
        SharesRequest(
            total_samples=batch_samples, members=tuple(evidence), current_shares=current, least_gain_ratio=STAY
        )
    )
    if not isinstance(decision, SharesDecision):
        raise ClusterError(f"a batch of {batch_samples} cannot be shared: {decision.reason}")
    return decision


def write(cluster: Cluster, job: Job, plan: Plan) -> None:
    """Put a plan where the workers read it, and touch the pods so that they read it at once."""
    patch = json.dumps({"data": {keys.PLAN_KEY: encode_plan(plan)}})
    cluster.kubectl("patch", "configmap", keys.plan_name(job.name), "--type=merge", "-p", patch)
    version = f"{plan.generation}.{plan.revision}"
    pods = [member.worker for member in plan.members]
    cluster.kubectl("annotate", "pod", *pods, "--overwrite", f"{keys.ANNOTATION_PLAN}={version}")


def switch(cluster: Cluster, *, replicas: int) -> None:
    """Turn the operator off or on, and wait until it is."""
    name = "heterotrain-operator"
    cluster.run("kubectl", "-n", OPERATOR_NAMESPACE, "scale", f"deployment/{name}", f"--replicas={replicas}")
    if replicas:
        rollout(cluster, OPERATOR_NAMESPACE, name)
        return

    def is_gone() -> bool:
        pods = cluster.run("kubectl", "-n", OPERATOR_NAMESPACE, "get", "pods", "-o", "name")
        return name not in pods

    wait_for(is_gone, "the operator to be gone", timeout_s=60)


if __name__ == "__main__":
    sys.exit(main())
