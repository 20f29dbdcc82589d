"""The API server accepts what `heterotrain init --from` makes of manifests of other projects."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from heterotrain_cli.main import main
from lab.cluster import Cluster
from support.cli_runner import CliRunner

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # the cluster's fixture fetches a module of Go, once

MANIFESTS = sorted((Path(__file__).parents[2] / "unit/cli/foreign").glob("*.yaml"))


@pytest.mark.parametrize("more", [(), ("--batch", "512", "--epochs", "20")], ids=["torchrun", "heterotrain"])
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_api_server_accepts_a_converted_manifest(cluster: Cluster, manifest: Path, more: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["init", "--from", str(manifest), *more])
    assert done.exit_code == 0, done.output
    body = yaml.safe_load(done.stdout)
    body["metadata"]["namespace"] = cluster.namespace
    made = cluster.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-", stdin=yaml.safe_dump(body)
    )
    assert made.strip() == f"heterotrainjob.heterotrain.dev/{body['metadata']['name']}"
