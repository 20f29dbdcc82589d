"""The chart's alerts by promtool: each fires for what is wrong, after its time and not before, and for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.helm import CHART, of_kind, render
from support.programs import program

PROMTOOL = program("promtool")

pytestmark = pytest.mark.needs_program("promtool", "helm")

SCRAPED = "monitoring.serviceMonitor.enabled=true"


def of_job(name: str) -> dict[str, str]:
    """Return the labels by which the operator's series name a job."""
    return {"job_uid": name, "job_name": name, "job_namespace": "team"}


OPERATOR = {"namespace": "ops", "pod": "operator"}
"""Labels of the target from which the operator's series come."""


def of_rank(name: str, local_rank: int = 0) -> dict[str, str]:
    """Return the labels of a rank's series: its own, and those that the monitor gives them."""
    own = {"worker": "w0", "worker_uid": f"{name}-w0", "local_rank": str(local_rank)}
    return {**of_job(name), "namespace": "team", "pod": "job-w0", **own}


def by_job(bad: dict[str, str], good: dict[str, str]) -> dict[str, str]:
    """Return the operator's series of the jobs "bad" and "good": values, in promtool's notation, by name."""
    return {
        written(f"heterotrain_operator_{series}", {**of_job(name), **OPERATOR}): values
        for name, found in (("bad", bad), ("good", good))
        for series, values in found.items()
    }


def by_rank(series: str, bad: str, good: str) -> dict[str, str]:
    """Return one series of a rank of the jobs "bad" and "good"."""
    return {
        written(f"heterotrain_{series}", of_rank("bad")): bad,
        written(f"heterotrain_{series}", of_rank("good")): good,
    }


def buckets(name: str, by_le: dict[str, str], **labels: str) -> dict[str, str]:
    """Return a histogram of the operator."""
    series = f"heterotrain_operator_{name}_bucket"
    return {written(series, {**labels, "le": le}): values for le, values in by_le.items()}


def written(series: str, labels: dict[str, str]) -> str:
    return series + "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series with a sample each minute, and when they raise the alert.

    Attributes:
        series: values in promtool's notation; ``7x60`` is 61 times 7, ``_x10`` ten missing samples.
        fires_min: the first minute in which the alert fires.
        over_min: a later minute in which it does not, if it ends by itself.
        labels: those of the alert, beside its severity.
        value: what the alert's text shows as its value.
    """

    series: dict[str, str]
    fires_min: int
    labels: dict[str, str]
    over_min: int | None = None
    value: str = ""


BY_JOB = {**of_job("bad"), **OPERATOR, "namespace": "team"}
"""The alert goes to the job's team, although the series is the operator's."""
BY_RANKS = {**of_job("bad"), "namespace": "team"}
RISING, CONSTANT = "0+1x90", "2x90"
CASES = {
    "HeteroTrainJobStuck": Case(
        series=by_rank("step", "0+1x20 20x70", RISING), fires_min=39, labels=BY_RANKS
    ),
    "HeteroTrainJobNotRunning": Case(
        series=by_job({"running": "1x5 0x90"}, {"running": "1x90"}), fires_min=36, labels=BY_JOB
    ),
    "HeteroTrainJobFailed": Case(
        series=by_job({"failed": "_x10 1x90"}, {"failed": "0x90"}), fires_min=10, over_min=70, labels=BY_JOB
    ),
    "HeteroTrainNoTelemetry": Case(
        series=by_job({"telemetry_available": "0x90"}, {"telemetry_available": "0x8 1 0x8 1x70"}),
        fires_min=10, labels=BY_JOB,
    ),
    "HeteroTrainWorkersIdle": Case(
        series=by_job(
            {"efficiency_ratio": "0.4x90", "efficiency_ceiling_ratio": "0.9x90"},
            {"efficiency_ratio": "0.4x90", "efficiency_ceiling_ratio": "0.7x90"},
        ),
        fires_min=30, labels=BY_JOB,
    ),
    "HeteroTrainGpuIdle": Case(
        # Without a formation, as a spare or while the script starts, a GPU may be idle.
        series=by_rank("gpu_utilization_ratio", "0.8x20 0.02x90", "0.5x90") | by_rank("waiting_seconds", "0x90", "0x90")
        | {written("heterotrain_gpu_utilization_ratio", of_rank("bad", 1)): "0x90"},
        fires_min=49, labels=of_rank("bad"),
    ),
    "HeteroTrainNotProgressing": Case(
        series=by_job({"progressing": "1x9 0x20 1x60"}, {"progressing": "1x90"}),
        fires_min=15, over_min=31, labels=BY_JOB,
    ),
    "HeteroTrainPlanNotApplied": Case(
        series=by_rank("plan_revision", "3x90", "4x90")
        | {
            written("heterotrain_plan_revision", of_rank("bad", 1)): "4x90",
            written("heterotrain_plan_revision", of_rank("good", 1)): "3x8 4x80",
        },
        fires_min=10, labels=BY_RANKS,
    ),
    "HeteroTrainPredictionOff": Case(
        series=by_job(
            {"measured_step_seconds": "0.8x90", "predicted_step_seconds": "1x90"},
            {"measured_step_seconds": "2.1x90", "predicted_step_seconds": "2x90"},
        ),
        fires_min=30, labels=BY_JOB,
    ),
    "HeteroTrainCheckpointFailing": Case(
        series=by_rank("checkpoint_failures_total", "0x5 1x80", CONSTANT), fires_min=6, over_min=40,
        labels=of_rank("bad"),
    ),
    "HeteroTrainNotFinite": Case(
        series=by_rank("non_finite_steps_total", "0x5 1x80", CONSTANT), fires_min=6, over_min=40, labels=BY_RANKS
    ),
    "HeteroTrainConnectionsRefused": Case(
        series=by_rank("refused_connections_total", "0x5 20x90", "7x90"), fires_min=6, over_min=70, labels=BY_RANKS,
    ),
    "HeteroTrainDiverging": Case(
        series=by_job({"diverging": "0x4 1x90"}, {"diverging": "1x8 0x90"}), fires_min=15, labels=BY_JOB,
    ),
    "HeteroTrainCopiesDiffered": Case(
        series=by_rank("divergences_total", "0x5 1x80", CONSTANT), fires_min=6, over_min=40, labels=BY_RANKS
    ),
    "HeteroTrainJobWaitingForNodes": Case(
        series=by_job(
            {"granted_workers": "1x90", "min_workers": "2x90"}, {"granted_workers": "2x90", "min_workers": "2x90"}
        ),
        fires_min=30, labels=BY_JOB,
    ),
    "HeteroTrainDeadlineAtRisk": Case(
        series=by_job({"deadline_at_risk": "1x90"}, {"deadline_at_risk": "1x3 0x80"}), fires_min=5,
        labels=BY_JOB,
    ),
    "HeteroTrainDisruptedRepeatedly": Case(
        series=by_job({"disruptions_in_a_row": "2x3 3x90"}, {"disruptions_in_a_row": "2x90"}), fires_min=4,
        labels=BY_JOB,
    ),
    "HeteroTrainOperatorBug": Case(
        series={
            'heterotrain_operator_internal_errors_total{part="the shares",pod="a"}': "0x5 1x80",
            'heterotrain_operator_internal_errors_total{part="the events",pod="a"}': CONSTANT,
        },
        fires_min=6, over_min=25, labels={"part": "the shares"},
    ),
    "HeteroTrainClockSkew": Case(
        series={
            'heterotrain_operator_clock_skew_seconds{pod="a"}': "-86400x90",
            'heterotrain_operator_clock_skew_seconds{pod="b"}': "-2x90",
        },
        fires_min=10, labels={"pod": "a"},
    ),
    "HeteroTrainOperatorBehind": Case(
        series={
            'heterotrain_operator_workqueue_depth{pod="a"}': "0x5 95x90",
            'heterotrain_operator_jobs{pod="a"}': "100x99",
            'heterotrain_operator_workqueue_depth{pod="b"}': "5x99", 'heterotrain_operator_jobs{pod="b"}': "5x99",
        },
        fires_min=21, labels={"pod": "a"},
    ),
    "HeteroTrainUrgentPassesLate": Case(
        series=buckets(
            "queue_duration_seconds", {"0.5": "0+60x20 1200x90", "2.5": "0+60x99", "+Inf": "0+60x99"}, priority="urgent"
        ) | buckets("queue_duration_seconds", {"0.5": "0x99", "2.5": "0+60x99", "+Inf": "0+60x99"}, priority="routine"),
        fires_min=31, labels={},
    ),
    "HeteroTrainEventLoopLate": Case(
        series=buckets("event_loop_delay_seconds", {"1": "0x99", "2.5": "0+60x99", "+Inf": "0+60x99"}, pod="a")
        | buckets("event_loop_delay_seconds", {"1": "0+60x99", "2.5": "0+60x99", "+Inf": "0+60x99"}, pod="b"),
        fires_min=11, labels={"pod": "a"},
    ),
    "HeteroTrainPassesSlow": Case(
        series=buckets("reconcile_duration_seconds", {"5": "0x99", "10": "0+60x99", "+Inf": "0+60x99"}),
        fires_min=11, labels={},
    ),
    "HeteroTrainOperatorMemory": Case(
        series={
            'process_resident_memory_bytes{job="operator",instance="a"}': f"{400 << 20}x9 {411 << 20}x90",
            'process_resident_memory_bytes{job="operator",instance="b"}': f"{400 << 20}x99",
            'process_resident_memory_bytes{job="other",instance="a"}': f"{900 << 20}x99",
            'heterotrain_operator_leader{job="operator",instance="a"}': "1x99",
            'heterotrain_operator_leader{job="operator",instance="b"}': "0x99",
        },
        fires_min=20, labels={"job": "operator", "instance": "a"},
    ),
    "HeteroTrainOperatorDown": Case(
        series={
            'heterotrain_operator_leader{pod="a"}': "1x10", 'heterotrain_operator_leader{pod="b"}': "0x20 1x9 0x60"
        },
        # Prometheus takes the last sample for five minutes: the leader "a" is gone after minute 14.
        fires_min=20, over_min=21, labels={},
    ),
}  # fmt: skip


@cache
def groups(*values: str) -> list[dict[str, Any]]:
    (rules,) = of_kind(render("monitoring.prometheusRule.enabled=true", *values), "PrometheusRule")
    return list(rules["spec"]["groups"])


def alerts(*values: str) -> dict[str, Any]:
    return {rule["alert"]: rule for group in groups(*values) for rule in group["rules"]}


def promtool(folder: Path, verb: str, name: str, document: object) -> str:
    """Run ``promtool VERB rules`` on a file; return what it says, and fail if it finds a mistake."""
    assert PROMTOOL is not None
    (folder / name).write_text(json.dumps(document))  # JSON is YAML
    done = subprocess.run([PROMTOOL, verb, "rules", name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def fires(alert: str, case: Case) -> dict[str, Any]:
    """Return the alert as promtool has to find it: with its labels, and its text filled in."""
    rule = alerts(SCRAPED)[alert]

    def filled(text: str) -> str:
        return re.sub(r"{{ \$(?:labels\.(\w+)|value) }}", lambda at: case.labels[at[1]] if at[1] else case.value, text)

    return {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {key: filled(text) for key, text in rule["annotations"].items()},
    }


def times(case: Case, fired: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    found: list[tuple[int, list[dict[str, Any]]]] = [(case.fires_min - 1, []), (case.fires_min, fired)]
    return [*found, (case.over_min, [])] if case.over_min else found


@pytest.mark.parametrize("values", [(), (SCRAPED,)], ids=["as it is", "scraped by the chart"])
def test_the_rules_are_valid(tmp_path: Path, values: tuple[str, ...]) -> None:
    said = promtool(tmp_path, "check", "rules.yaml", {"groups": groups(*values)})
    assert f"{len(CASES)} rules found" in said


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == alerts().keys()


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_in_time_for_what_is_wrong_and_names_it(tmp_path: Path, alert: str) -> None:
    case = CASES[alert]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": groups(SCRAPED)}))
    unit = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}
            for minute, expected in times(case, [fires(alert, case)])
        ],
    }
    promtool(
        tmp_path, "test", "unit.yaml", {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [unit]}
    )


@pytest.mark.parametrize(("values", "count"), [((), 0), ((SCRAPED,), 1)], ids=["as it is", "scraped by the chart"])
def test_an_operator_that_never_appears_raises_an_alert_only_where_the_chart_has_it_scraped(
    tmp_path: Path, values: tuple[str, ...], count: int
) -> None:
    name = "HeteroTrainOperatorDown"
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": groups(*values)}))
    expected = [fires(name, CASES[name])] * count
    unit = {
        "interval": "1m",
        "input_series": [{"series": "another", "values": "1x20"}],
        "alert_rule_test": [{"eval_time": "10m", "alertname": name, "exp_alerts": expected}],
    }
    promtool(
        tmp_path, "test", "unit.yaml", {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [unit]}
    )


def test_a_leader_that_is_lost_raises_an_alert_even_if_nothing_tells_prometheus_about_the_operator(
    tmp_path: Path,
) -> None:
    """The chart does not have it scraped, but somebody did: its series ended."""
    name = "HeteroTrainOperatorDown"
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": groups()}))
    unit = {
        "interval": "1m",
        "input_series": [{"series": "heterotrain_operator_leader", "values": "1x10 0x60"}],
        "alert_rule_test": [
            {"eval_time": "15m", "alertname": name, "exp_alerts": []},
            {"eval_time": "16m", "alertname": name, "exp_alerts": [fires(name, CASES[name])]},
        ],
    }
    promtool(
        tmp_path, "test", "unit.yaml", {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [unit]}
    )


def test_every_alert_links_to_its_place_in_the_guide() -> None:
    guide = (CHART.parents[1] / "docs/operations.md").read_text()
    for alert, rule in alerts("monitoring.prometheusRule.runbookUrl=https://docs.example/operations").items():
        anchor = alert.lower()
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{anchor}"
        assert rule["annotations"]["runbook_url"] == f"https://docs.example/operations#{anchor}"
        assert f'<a id="{anchor}"></a>`{alert}`' in guide
        assert "runbook_url" not in alerts()[alert]["annotations"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_every_alert_about_a_job_names_it_and_goes_to_its_team() -> None:
    of_the_operator = re.compile("Operator|Passes|EventLoop|ClockSkew")
    for alert, rule in alerts().items():
        if of_the_operator.search(alert):
            assert "namespace" not in rule["labels"], alert
        else:
            assert rule["labels"]["namespace"] == "{{ $labels.job_namespace }}", alert
            assert "Job {{ $labels.job_namespace }}/{{ $labels.job_name }}" in rule["annotations"]["description"], alert


def test_every_way_to_scrape_workers_gives_their_series_the_name_and_namespace_of_the_job() -> None:
    """Alerts about ranks have no other way to name a job."""
    (monitor,) = of_kind(render("monitoring.podMonitor.enabled=true"), "PodMonitor")
    wanted = {
        ("__meta_kubernetes_namespace", "job_namespace"),
        ("__meta_kubernetes_pod_label_heterotrain_dev_job", "job_name"),
    }
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert wanted <= {(*each["sourceLabels"], each["targetLabel"]) for each in endpoint["relabelings"]}
    objects = yaml.safe_load_all((CHART.parents[1] / "deploy/monitoring/prometheus.yaml").read_text())
    (text,) = [each["data"]["prometheus.yml"] for each in objects if each["kind"] == "ConfigMap"]
    workers = yaml.safe_load(text)["scrape_configs"][0]["relabel_configs"]
    assert wanted <= {(*each["source_labels"], each.get("target_label")) for each in workers}


def test_everything_that_operating_says_to_watch_has_an_alert() -> None:
    guide = (CHART.parents[1] / "docs/operating.md").read_text()
    (table,) = re.findall(r"\n\| watch \| [^\n]*\n\|[- |]*\n((?:\|[^\n]*\n)+)", guide)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) >= 5, "the table is found"
    for watched, alert, _ in rows:
        (metric,) = re.findall(r"^`(\w+)`", watched)
        assert metric in alerts()[alert.strip("`")]["expr"], watched
    queried = " ".join(rule["expr"] for rule in alerts().values())
    assert [each for each in re.findall(r"`((?:heterotrain|process)_\w+)`", guide) if each not in queried] == []


@pytest.mark.parametrize(
    ("limit", "count"), [("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("1000000", 10**6)]
)
def test_the_alert_about_memory_follows_the_limit(limit: str, count: int) -> None:
    assert f"0.8 * {count} " in alerts(f"resources.limits.memory={limit}")["HeteroTrainOperatorMemory"]["expr"]


def test_without_a_limit_there_is_no_alert_about_it() -> None:
    assert "HeteroTrainOperatorMemory" not in alerts("resources.limits=null")
