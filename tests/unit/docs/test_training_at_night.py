"""The CronJobs of the language model's guide change the guide's own job, and have the rights for it and for no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_operator.api.admission import read_new_job

EXAMPLE = Path(__file__).parents[3] / "deploy/examples/language-model"


def objects(kind: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((EXAMPLE / "schedule.yaml").read_text()) if each["kind"] == kind]


@pytest.mark.parametrize(("name", "suspends", "hour"), [("training-resume", False, 20), ("training-suspend", True, 7)])
def test_a_cron_job_suspends_or_resumes_the_job(name: str, suspends: bool, hour: int) -> None:
    (cron,) = [each["spec"] for each in objects("CronJob") if each["metadata"]["name"] == name]
    assert (cron["schedule"], cron["timeZone"]) == (f"0 {hour} * * *", "Etc/UTC")
    pod = cron["jobTemplate"]["spec"]["template"]["spec"]
    program, verb, kind, job_name, merge, patch = pod["containers"][0]["command"]
    assert (program, verb, kind, merge) == ("kubectl", "patch", "htj", "--type=merge")
    job = yaml.safe_load((EXAMPLE / "job-s3.yaml").read_text())
    assert job["metadata"]["name"] == job_name
    job["spec"].update(json.loads(patch.removeprefix("--patch="))["spec"])
    assert read_new_job(job).suspend is suspends


def test_the_cron_jobs_may_change_this_job_only() -> None:
    (account,), (role,), (binding,) = objects("ServiceAccount"), objects("Role"), objects("RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["heterotrain.dev"], "resources": ["heterotrainjobs"], "resourceNames": ["language-model"],
            "verbs": ["get", "patch"],
        }
    ]  # fmt: skip
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [account["metadata"]["name"]]
    for cron in objects("CronJob"):
        pod = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == account["metadata"]["name"]
