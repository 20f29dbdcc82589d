"""`make bench-prediction`: how well step times of shares that were never used are predicted, on the real cluster.

A job on the three pools learns for one epoch as any job does. Then the operator is switched off, so that plans can be
written by hand, and a series of plans gives the workers global batches and shares that they have not had before. Each
step time is predicted before the plan is written, by the code that the operator runs on the counters that it reads
(`planning.shares`, `prom.queries`), and measured afterwards. Two predictions: from all that was seen up to then, as the
operator would say it, and from the learning epoch alone.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Boundary, BoundaryKind, Plan
from heterotrain_core.perf.samples import CounterKey, Counters, Observation, observe
from heterotrain_core.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from heterotrain_core.split.proportion import in_proportion
from heterotrain_operator.prom.queries import Snapshot, counter_name, everything_of, parse_everything, parse_vector
from heterotrain_operator.world.telemetry import MemberId
from rich.console import Console
from rich.table import Table

from lab.cluster import REPOSITORY, Cluster, ClusterError, wait_for
from lab.demo import prepare, start
from lab.install import OPERATOR_NAMESPACE, install, rollout, this_cluster
from lab.jobs import Job
from lab.live import Live
from lab.telemetry import Prometheus

BATCH = 480
LEARNING_STEPS = 24
"""Steps of the epoch from which the job learns."""
BATCHES = (336, 672, 560, 400, 768)
"""Global batches after that, none of them used before; the first half of the plans is optimal for them."""
MEASURED_STEPS = 20
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_TOP_PAD_": "200000000"}
"""glibc keeps freed memory, as CUDA's caching allocator does. Otherwise each tensor of more than 32 MiB is mapped and
cleared anew at every step, and a sample of a large share costs half as much again as one of a small share."""
STRAY = 0.35
"""By how much shares are off from optimal ones, up or down, in the second half of the plans."""
STAY = 1e9
"""A gain that no change of shares promises: the decision keeps the shares it is asked about, and predicts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan: seconds of a step as predicted from everything, from the learning epoch alone, and as measured."""

    shares: tuple[int, ...]
    predicted_s: float
    early_s: float
    measured_s: float
    steps: int


@dataclass(slots=True)
class Watch:
    """A job's counters, read as the operator reads them, and what lay between two looks."""

    prometheus: Prometheus
    job_uid: str
    counters: Mapping[CounterKey, Counters] = field(default_factory=dict)
    seen: list[Observation] = field(default_factory=list)

    def read(self) -> Snapshot:
        """Return what Prometheus holds of the job now."""
        rows = self.prometheus.query(everything_of(self.job_uid))
        return parse_everything(parse_vector({"status": "success", "data": {"resultType": "vector", "result": rows}}))

    def look(self) -> tuple[Observation, ...]:
        """Return, and remember, what happened since the last look."""
        counters = self.read().counters
        fresh = observe(self.counters, counters, ended_s=time.time())
        self.counters = {**self.counters, **counters}
        self.seen.extend(fresh)
        return fresh

    def evidence(self, plan: Plan) -> tuple[MemberEvidence, ...]:
        """Return what is known of the plan's members, by rank."""
        names = [counter_name(MemberId(member.worker_uid, member.local_rank)) for member in plan.members]
        return tuple(
            MemberEvidence(member=name, pool=member.pool, observations=tuple(o for o in self.seen if o.member == name))
            for name, member in zip(names, plan.members, strict=True)
        )


def main() -> int:
    """Run the series, print the table, and write it to ``--out``; 1 with one sentence when something does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/prediction")
    parser.add_argument("--seed", type=int, default=1, help="of the shares that are not optimal")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the operator has to be switched on again in any case
    try:
        cluster = this_cluster("prediction")
        install(cluster)
        rows = measure(cluster, random.Random(arguments.seed))  # noqa: S311  # no secret
    except (ClusterError, AssertionError) as error:
        print(f"prediction: {error}", file=sys.stderr)
        return 1
    show(rows, arguments.out)
    return 0


def measure(cluster: Cluster, chance: random.Random) -> list[Row]:
    """Let a job learn for one epoch and measure the plans that follow; the operator runs again afterwards."""
    prepare(cluster)
    job = start(
        cluster,
        "prediction",
        {"epochs": 1000, "globalBatchSize": BATCH},
        ["--samples-per-epoch", str(LEARNING_STEPS * BATCH)],
        {"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}},
        environment=KEEP_MEMORY,
    )
    watch = Watch(Prometheus(cluster), job.uid())
    try:
        with Live(job):
            job.wait_epoch(1, timeout_s=300)
        switch(cluster, replicas=0)
        watch.look()
        plan = job.plan()
        if plan is None:
            raise ClusterError("the job has no plan")
        early = watch.evidence(plan)
        rows: list[Row] = []
        for number, batch in enumerate((*BATCHES, *reversed(BATCHES))):
            shares = best_shares(batch, watch.evidence(plan))
            if number >= len(BATCHES):
                stray = [share * chance.uniform(1 - STRAY, 1 + STRAY) for share in shares]
                shares = in_proportion(batch, [round(1000 * share) for share in stray])
            plan, row = one(cluster, job, watch, replace(plan, global_batch_samples=batch), shares, early=early)
            rows.append(row)
            print(f"{row.shares}: predicted {row.predicted_s:.3f} s, measured {row.measured_s:.3f} s", flush=True)
        return rows
    finally:
        switch(cluster, replicas=1)
        cluster.delete(keys.PLURAL, job.name)


def one(
    cluster: Cluster, job: Job, watch: Watch, plan: Plan, shares: tuple[int, ...], *, early: Sequence[MemberEvidence]
) -> tuple[Plan, Row]:
    """Predict these shares, put them into force, measure them, and return the plan and the row."""
    predicted_s, early_s = (predict(shares, evidence) for evidence in (watch.evidence(plan), early))
    written = replace(
        plan,
        revision=plan.revision + 1,
        members=tuple(replace(m, share_samples=share) for m, share in zip(plan.members, shares, strict=True)),
        boundary=Boundary(kind=BoundaryKind.STEPS, every_steps=2),
        probe=(),
        probe_steps=0,
        prediction=None,
        reason="shares to be measured",
    )
    write(cluster, job, written)
    names = {m.member: share for m, share in zip(watch.evidence(plan), shares, strict=True)}

    def done() -> dict[str, Observation] | None:
        """Return each member's steps with these shares since the last look, when all have made enough of them."""
        fresh = observe(watch.counters, watch.read().counters, ended_s=time.time())
        mine = {o.member: o for o in fresh if names.get(o.member) == o.share_samples and o.step is not None}
        enough = len(mine) == len(names) and min(o.steps for o in mine.values()) >= MEASURED_STEPS
        return mine if enough else None

    mine = wait_for(done, f"{MEASURED_STEPS} steps with shares {shares}", timeout_s=180, every_s=1.0)
    watch.look()
    measured = [o.step.mean for o in mine.values() if o.step is not None]
    return written, Row(
        shares=shares,
        predicted_s=predicted_s,
        early_s=early_s,
        measured_s=statistics.mean(measured),
        steps=min(o.steps for o in mine.values()),
    )


def predict(shares: tuple[int, ...], evidence: Sequence[MemberEvidence]) -> float:
    """Return the seconds of a step with these shares that the operator would write into its plan."""
    decision = _decided(sum(shares), evidence, current=shares)
    if decision.shares != shares or decision.prediction is None:
        raise ClusterError(f"no prediction for shares {shares}: {decision.reason}")
    return decision.prediction.step_s


def best_shares(batch_samples: int, evidence: Sequence[MemberEvidence]) -> tuple[int, ...]:
    """Return the shares that the operator would choose."""
    return _decided(batch_samples, evidence, current=None).shares


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


def show(rows: Sequence[Row], out: Path) -> None:
    """Print the table and the medians, and write both to ``out/prediction.txt``."""
    table = Table(title="Step times of shares that were not used before: predicted, then measured")
    for heading in ("batch", "shares", "measured", "predicted", "off", "from the learning epoch alone", "off"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(sum(row.shares)),
            " : ".join(map(str, row.shares)),
            f"{row.measured_s:.3f} s",
            f"{row.predicted_s:.3f} s",
            f"{row.predicted_s / row.measured_s - 1:+.1%}",
            f"{row.early_s:.3f} s",
            f"{row.early_s / row.measured_s - 1:+.1%}",
        )
    console = Console(record=True, width=120)
    console.print(table)
    for what, errors in (
        ("predicted", [abs(row.predicted_s / row.measured_s - 1) for row in rows]),
        ("from the learning epoch alone", [abs(row.early_s / row.measured_s - 1) for row in rows]),
    ):
        console.print(f"{what}: off by {statistics.median(errors):.1%} in the median, at most {max(errors):.1%}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "prediction.txt").write_text(console.export_text())


if __name__ == "__main__":
    sys.exit(main())
