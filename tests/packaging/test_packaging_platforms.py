"""Platforms in docs/install.md: the chart accepts the values of each platform, and the API its pools."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from heterotrain_operator.api.admission import read_new_job
from support.helm import CHART, HELM
from support.platforms import PLATFORM, TEXT, blocks, job


def test_every_block_of_yaml_is_tested() -> None:
    assert len(blocks("values")) + len(blocks("pools")) == TEXT.count("```yaml")
    assert [name for name, _ in blocks("values")] == PLATFORM.findall(TEXT)


@pytest.mark.needs_program("helm")
@pytest.mark.parametrize(("platform", "text"), blocks("values"), ids=[name for name, _ in blocks("values")])
def test_the_chart_takes_the_values(platform: str, text: str) -> None:
    assert HELM is not None
    command = [HELM, "template", "heterotrain", str(CHART), "--kube-version", "1.36.0", "--values", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("platform", "text"), blocks("pools"), ids=[name for name, _ in blocks("pools")])
def test_the_api_takes_the_pools(platform: str, text: str) -> None:
    body = job(text)
    assert [pool.name for pool in read_new_job(body).worker_pools] == [pool["name"] for pool in yaml.safe_load(text)]
