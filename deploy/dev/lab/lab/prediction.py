"""`make bench-prediction`: the errors of predicted step times for new shares, on the real cluster.

1. A job on the three pools learns for one epoch, as any job does. Then the operator is switched off.
2. This program writes five plans, each with a global batch that is new to the job. Each plan alternates every few steps
   between two vectors of shares: the operator's choice, and a random deviation from it.
3. The operator's code predicts both before either is applied, from the counters that it reads: once from all data so
   far, and once from the learning epoch alone. Then both are measured over all of their turns.
4. Between these turns the shares of the learning epoch's end come back. "At the measured pace" is the first prediction
   times the measured over the predicted time of these known shares, so the step time relative to known shares.

Two sources of error are kept apart. Each mean has a standard error of its own, from the means between scrapes and their
correlation in time: the error of the measurement. Turns last a few seconds, so a longer slowdown of the machine hits
all of them alike. Ratios are therefore free of drift, and their error is the model's.
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
from heterotrain_core.split.proportion import in_proportion
from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares

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
"""Steps of the learning epoch."""
BATCHES = (336, 672, 560, 400, 768)
"""Global batches after the learning epoch, all of them new; each is measured with optimal and with other shares."""
ROUNDS = 20
"""Default number of rounds for each batch; a round has the known shares and the new ones, in alternating order."""
MEASURED_STEPS = 4
"""Least number of steps with each vector of shares in a round."""
TURN_STEPS = 4
"""Successive steps with one vector of shares."""
TURNS = 10
"""Turns in a plan, more than an epoch has; each epoch begins with the first vector."""
STRAY = 0.35
"""Largest relative deviation from the optimal shares in the second vector."""
STAY = 1e9
"""A required gain that no change of shares reaches, so that a decision keeps the given shares and predicts them."""


def main() -> int:
    """Run the series, print the table and write it to ``--out``; on an error print it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/prediction")
    parser.add_argument("--seed", type=int, default=1, help="of the shares that are not optimal")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"of known and new shares, for each batch ({ROUNDS})"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds has to be at least 1, not {arguments.rounds}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the operator is switched on again in any case
    try:
        cluster = this_cluster("prediction")
        install(cluster)
        rows = measure(cluster, random.Random(arguments.seed), rounds=arguments.rounds)  # noqa: S311  # not a secret
    except (ClusterError, AssertionError) as error:
        print(f"prediction: {error}", file=sys.stderr)
        return 1
    show(rows, arguments.out)
    return 0


def measure(cluster: Cluster, rng: random.Random, *, rounds: int) -> list[Row]:
    """Let a job learn for one epoch, then measure plans without the operator; switch it on again afterwards."""
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
        scrapes.read(until_s=time.time())
        plan = job.plan()
        if plan is None:
            raise ClusterError("the job has no plan")
        known = plan.shares
        early = scrapes.evidence(plan)
        rows: list[Row] = []
        for batch in BATCHES:
            now = scrapes.evidence(plan)
            vectors = (best_shares(batch, now), stray_shares(batch, now, rng))
            predicted = [(predict(shares, now), predict(shares, early)) for shares in vectors]
            known_s = predict(known, now)
            plan, observed = in_turns(cluster, job, scrapes, plan, (*vectors, known), rounds=rounds)
            pace_ratio = mean_with_error(observed[-1])[0] / known_s
            print(f"known shares {known}: {pace_ratio:.3f} times as long as predicted", flush=True)
            for shares, (predicted_s, early_s), steps in zip(vectors, predicted, observed, strict=False):
                measured_s, error_s = mean_with_error(steps)
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


def stray_shares(batch_samples: int, evidence: Sequence[MemberEvidence], rng: random.Random) -> tuple[int, ...]:
    """Return shares that deviate from the optimal ones by up to ``STRAY``."""
    stray = [share * rng.uniform(1 - STRAY, 1 + STRAY) for share in best_shares(batch_samples, evidence)]
    return in_proportion(batch_samples, [round(1000 * share) for share in stray])


def in_turns(
    cluster: Cluster,
    job: Job,
    scrapes: Scrapes,
    plan: Plan,
    vectors: Sequence[tuple[int, ...]],
    *,
    rounds: int,
    turn_steps: int = MEASURED_STEPS,
) -> tuple[Plan, list[Mapping[str, Sequence[Observation]]]]:
    """Alternate between the last vector and the others, which have one batch, until all have enough steps.

    The order is ABBA, so that a drift of the machine affects both alike.

    Returns the plan in force and, for each vector, the members' observations between successive scrapes. They come only
    from members whose share is unique to the vector, compared with the other vectors and the plan before.
    """
    names = [name_of(rank.worker_uid, rank.local_rank) for rank in plan.ranks]
    used = [*vectors, plan.shares, *plan.probe]
    distinct = [
        {
            name: share
            for rank, (name, share) in enumerate(zip(names, shares, strict=True))
            if all(share != other[rank] for other in used if other != shares)
        }
        for shares in vectors
    ]
    before = len(scrapes.observations)
    in_force: Sequence[tuple[int, ...]] = ()

    def observed() -> list[Mapping[str, Sequence[Observation]]]:
        scrapes.read(until_s=time.time())
        new = [o for o in scrapes.observations[before:] if o.step is not None]
        return [
            {name: [o for o in new if (o.member, o.share_samples) == (name, share)] for name, share in shares.items()}
            for shares in distinct
        ]

    def steps_of(turns: Sequence[tuple[int, ...]]) -> float:
        """Return the smallest number of steps among these vectors; infinity if no member has a unique share."""
        found = [by_member for shares, by_member in zip(vectors, observed(), strict=True) if shares in turns]
        return min((sum(o.steps for o in each) for by_member in found for each in by_member.values()), default=math.inf)

    def apply(turns: Sequence[tuple[int, ...]]) -> None:
        """Apply these vectors, and return after enough further steps with each of them."""
        nonlocal plan, in_force
        if turns != in_force:
            plan, in_force = turning(plan, turns), turns
            write(cluster, job, plan)
        steps = steps_of(turns) + turn_steps
        wait_for(
            lambda: steps_of(turns) >= steps, f"{steps:.0f} steps with each of {turns}", timeout_s=300, every_s=0.5
        )

    sides = (vectors[-1:], vectors[:-1])
    for number in range(rounds):
        for turns in reversed(sides) if number % 2 else sides:
            apply(turns)
    return plan, observed()


def turning(plan: Plan, vectors: Sequence[tuple[int, ...]]) -> Plan:
    """Return the next plan, which alternates between these vectors of one batch."""
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
    """Return the operator's prediction of the step time with these shares, in seconds."""
    decision = _decided(sum(shares), evidence, current=shares)
    if decision.division.shares != shares or decision.division.prediction is None:
        raise ClusterError(f"no prediction for shares {shares}: {decision.reason}")
    return decision.division.prediction.step_s


def best_shares(batch_samples: int, evidence: Sequence[MemberEvidence]) -> tuple[int, ...]:
    """Return the operator's choice of shares."""
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
    """Write a plan into the job's ConfigMap, and touch the pods so that they read it at once."""
    patch = json.dumps({"data": {keys.PLAN_KEY: encode_plan(plan)}})
    cluster.kubectl("patch", "configmap", keys.plan_name(job.name), "--type=merge", "-p", patch)
    version = f"{plan.generation}.{plan.revision}"
    pods = [rank.worker for rank in plan.ranks]
    cluster.kubectl("annotate", "pod", *pods, "--overwrite", f"{keys.ANNOTATION_PLAN}={version}")


def switch(cluster: Cluster, *, replicas: int) -> None:
    """Scale the operator to this number of replicas, and wait until it is done."""
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
