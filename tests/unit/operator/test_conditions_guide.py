"""docs/operations.md against the conditions of real jobs: each row belongs to its condition and status."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.lifecycle import LifeStage
from support.fake_cluster import FakeCluster, a_running_job

GUIDE = (Path(__file__).parents[3] / "docs/operations.md").read_text().partition("\n## Events\n")[0]


def rows() -> set[tuple[str, str, str]]:
    """Return type, status and reason of every row about a condition."""
    found, kinds, status = set(), [""], ""
    for line in GUIDE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 6:
            continue
        kinds = ["Succeeded", "Failed"] if cells[1] == "both" else re.findall(r"`(\w+)`", cells[1]) or kinds
        status = cells[2] or status
        found |= {(kind, status, reason) for kind in kinds for reason in re.findall(r"`([^`\n]+)`", cells[3])}
    return found


def with_problem(cluster: FakeCluster) -> FakeCluster:
    cluster.telemetry = Telemetry(problem="no answer", reason="Unavailable")
    return cluster


JOBS: dict[str, Callable[[], FakeCluster]] = {
    "new": FakeCluster,
    "without nodes": lambda: FakeCluster().start(),
    "running": a_running_job,
    "without telemetry": lambda: with_problem(a_running_job()),
    "suspended": lambda: a_running_job().edit(lambda spec: spec.update(suspend=True)),
    "invalid": lambda: FakeCluster().edit(lambda spec: spec.update(workerPools=[])),
    "failed": lambda: a_running_job(backoffLimit=0).end("job-w0", Ending.FAILED, exit_code=1, reason="boom"),
    "succeeded": lambda: a_running_job().end("job-w0", Ending.FINISHED, reason="done"),
    "below the minimum": lambda: a_running_job(elasticPolicy={"minReplicas": 3}).set_node("a", "Unknown"),
    "losing a worker": lambda: a_running_job().taint("a", "karpenter.sh/disrupted:NoSchedule"),
    "pipeline without profiles": lambda: a_running_job(parallelism={"mode": "Pipeline"}),
    "with a deadline": lambda: a_running_job(objective="Deadline", deadline="2027-06-01T00:00:00Z"),
}
EVERYWHERE = {"NotTraining", "NotReported", "NotScrapedYet"}
SUMMARIES = ("Ready", "Reconciling", "Stalled")
OF_STAGES = {stage.value for stage in LifeStage} - {LifeStage.ACTIVE.value}


@pytest.mark.parametrize("name", list(JOBS))
def test_a_condition_has_the_reasons_of_its_own_rows(name: str) -> None:
    """The conditions of real jobs, with status and reason, are in the tables; summaries repeat another one's reason."""
    cluster = JOBS[name]()
    known, seen = rows(), set()
    for _ in range(3):
        cluster.step()
        cluster.pass_time(40)
        seen |= {(str(c["type"]), str(c["status"]), str(c["reason"])) for c in cluster.status["conditions"]}
    of_layouts = {reason for kind, status, reason in known if kind == "LayoutPlanned" and status != "True"}
    others = {reason for kind, _, reason in known | seen if kind not in SUMMARIES}
    allowed = {
        **dict.fromkeys(SUMMARIES, others),
        "Scheduled": OF_STAGES | EVERYWHERE,
        "WorkersLimited": OF_STAGES | EVERYWHERE,
        "Running": OF_STAGES | of_layouts,
    }
    unknown = {row for row in seen - known if row[2] not in allowed.get(row[0], EVERYWHERE)}
    assert unknown == set()
