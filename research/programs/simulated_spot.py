"""Simulated: the recorded p3 spot trace with given pauses. Prints Markdown for research/README.md.

ResNet-50 on the trace's V100 nodes, one worker each, batch 3200. Every change of members costs a pause, and a loss
also the step in flight. The heterotrain policy runs with four pauses: a cautious second for everything (``--loss``,
``--join``), two measured ones (docs/benchmarks.md), and the one that Oobleck (SOSP 2023) published for BERT-large and
GPT-2. Effective time is that of the job; in node-seconds, each node also counts from its appearance until it trains.
Figures are the least and the greatest over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from heterotrain_simulator.baselines import Even
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import Policy
from heterotrain_simulator.scenario import Group, Pauses, Scenario
from heterotrain_simulator.spot_traces import P3, as_changes
from heterotrain_simulator.workloads import IMAGENET, PRICES_PER_HOUR
from spreads import least_to_most

BATCH = 3200
CLUSTER_LOSS_S = 0.72
"""The longest measured gap at a SIGKILL, an ordinary step included; a join was not measured separately."""
OOBLECK_S = 2.0
"""Oobleck's pause at a change of members."""
BARE_LOSS_S, BARE_JOIN_S = 0.116, 0.08
"""Medians at a SIGKILL and at a join, of three processes on one machine."""


def main() -> None:
    """Print the effective time for each kind of pause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", type=float, default=1.0, help="seconds without training after a loss")
    parser.add_argument("--join", type=float, default=1.0, help="seconds without training at a join")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    arguments = parser.parse_args()
    # The end of the trace ends the run, not the target.
    workload = replace(IMAGENET, target_steps=1e12)
    scenario = Scenario(
        name="p3",
        workload=workload,
        groups=(Group(pool="spot", gpu="v100", count=0, price_per_hour=PRICES_PER_HOUR["v100"]),),
        network=Network(bytes_per_s=0.8 * 10e9 / 8, latency_s=20e-6),
        changes=as_changes(P3, "spot"),
        batch_samples=BATCH,
        end_s=P3.end_s,
    )
    print(
        f"Simulated: {workload.what}, batch {BATCH}, on {P3.what} as recorded: {P3.end_s / 3600:.1f} h, "
        f"at most {P3.peak} nodes, {P3.mean_nodes:.1f} in the mean.\n"
    )
    print("| who | pause at a loss / a join | changes | effective time | of node-seconds | samples/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    kinds: list[tuple[str, Callable[[], Policy], Pauses]] = [
        ("survivors go on, cautiously", HeterotrainPolicy, Pauses(loss_s=arguments.loss, join_s=arguments.join)),
        (
            "survivors go on, as on the emulated cluster",
            HeterotrainPolicy,
            Pauses(loss_s=CLUSTER_LOSS_S, join_s=arguments.join),
        ),
        ("survivors go on, Oobleck's pause", HeterotrainPolicy, Pauses(loss_s=OOBLECK_S, join_s=OOBLECK_S)),
        ("survivors go on, as bare processes", HeterotrainPolicy, Pauses(loss_s=BARE_LOSS_S, join_s=BARE_JOIN_S)),
        ("restart from a checkpoint, 10 s", Even, Pauses(restart_s=10.0)),
        ("restart, 75 s", Even, Pauses(restart_s=75.0)),
        (
            f"restart, {IMAGENET.restart_s:.0f} s (published for this job)",
            Even,
            Pauses(restart_s=IMAGENET.restart_s),
        ),
    ]
    for name, policy, pauses in kinds:
        of = replace(scenario, pauses=pauses)
        found = [simulate(of, policy(), seed=seed) for seed in range(1, arguments.seeds + 1)]
        pause = f"{pauses.restart_s:g} s" if policy().restarts else f"{pauses.loss_s:g} / {pauses.join_s:g} s"
        node_s = P3.mean_nodes * P3.end_s
        columns = (
            least_to_most([outcome.effective_part for outcome in found], ".2%"),
            least_to_most([outcome.worker_training_s / node_s for outcome in found], ".2%"),
            least_to_most([outcome.samples / outcome.end_s for outcome in found], ".0f"),
        )
        print(f"| {name} | {pause} | {found[0].changes} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
