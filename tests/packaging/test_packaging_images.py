"""Images that manifests name: a stranger's cluster can pull them, or the README replaces them."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.install import LOCAL_PROMETHEUS_IMAGE, PROMETHEUS_MANIFEST, PROMETHEUS_URL, local_prometheus
from local_cluster.kind import PROMETHEUS
from support.wheels import built

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = sorted([*REPOSITORY.glob("deploy/monitoring/*.yaml"), *REPOSITORY.glob("deploy/examples/*/*.yaml")])
PUBLIC = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+/[a-z0-9._/-]+(:v?[0-9]+(\.[0-9]+)+|@sha256:[0-9a-f]{64})")
"""A registry with a host name, and a tag or digest that stays the same."""
OWN_TRAINER = "heterotrain/trainer:dev"
"""The image of the emulated cluster; the README's command replaces it by the user's own."""


def images_of(node: Any) -> list[str]:
    """Return the images of all containers in an object."""
    if isinstance(node, list):
        return [image for each in node for image in images_of(each)]
    if not isinstance(node, dict):
        return []
    own = [each["image"] for kind in ("containers", "initContainers") for each in node.get(kind) or ()]
    return own + [image for each in node.values() for image in images_of(each)]


def images_in(manifest: str) -> list[str]:
    return images_of(list(yaml.safe_load_all(manifest)))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_image_can_be_pulled_or_is_replaced_by_the_readme(path: Path) -> None:
    own = {OWN_TRAINER} if "examples" in path.parts else set()
    found = [image for image in images_in(path.read_text()) if image not in own]
    assert [image for image in found if not PUBLIC.fullmatch(image)] == []


def test_the_readme_replaces_the_image_of_the_examples() -> None:
    command = re.search(r"sed s,(\S+),(\S+), (deploy/examples/\S+)", (REPOSITORY / "docs/install.md").read_text())
    assert command is not None
    replaced = (REPOSITORY / command[3]).read_text().replace(command[1], command[2])
    assert images_in(replaced) == ["REGISTRY/heterotrain-trainer:0.1.0"]


def test_the_emulated_cluster_runs_the_same_prometheus_from_its_own_nodes() -> None:
    manifest = PROMETHEUS_MANIFEST.read_text()
    (public,) = images_in(manifest)
    assert images_in(local_prometheus(manifest)) == [LOCAL_PROMETHEUS_IMAGE]
    assert (public, LOCAL_PROMETHEUS_IMAGE) == PROMETHEUS
    modules = (REPOSITORY / "deploy/dev/cluster/go.mod").read_text()
    (module,) = re.findall(r"github.com/prometheus/prometheus v0\.(\d+)\.(\d+)", modules)
    assert public.endswith(f":v3.{int(module[0]) - 300}.{module[1]}")  # its Go modules count 3.15 as 0.315


def test_the_urls_of_prometheus_in_the_readme_and_the_cluster_are_the_service_of_the_manifest() -> None:
    objects = [each for each in yaml.safe_load_all(PROMETHEUS_MANIFEST.read_text()) if each]
    (service,) = [each for each in objects if each["kind"] == "Service"]
    (port,) = service["spec"]["ports"]
    url = f"http://{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
    assert url == PROMETHEUS_URL
    assert f"prometheus.url={url}" in (REPOSITORY / "docs/install.md").read_text()


def files_of(wheel: Path) -> dict[str, int]:
    """Return a wheel's files with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_the_build_context_of_images_gives_the_wheel_of_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Images install this wheel; a package that .dockerignore leaves out would be missing in them without an error."""
    ignored, *kept = (REPOSITORY / ".dockerignore").read_text().split()
    assert ignored == "*"
    context = tmp_path / "context"
    for path in (line.removeprefix("!") for line in kept if line.startswith("!")):
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (REPOSITORY / path).is_dir() else shutil.copy
        copy(REPOSITORY / path, context / path)
    assert files_of(built(context, tmp_path / "wheel")) == files_of(wheel)


@pytest.mark.parametrize("name", ["operator", "trainer"])
def test_an_image_installs_the_wheel_and_has_a_home_for_any_user(name: str) -> None:
    stages = (REPOSITORY / name / "Dockerfile").read_text().split("\nFROM ")
    last = stages[-1]
    assert len(stages) == {"operator": 3, "trainer": 4}[name]
    assert stages[1].startswith("${BASE} AS wheel\n")
    assert "--require-hashes -r /build/build.txt" in stages[1]
    assert "hatchling build -t wheel -d /wheel" in stages[1]
    assert "--no-deps /wheel/*.whl" in stages[1]
    source = {"operator": "wheel", "trainer": "pod"}[name]
    assert f"COPY --from={source} /opt/heterotrain /opt/heterotrain\n" in last
    assert re.findall(r"(?m)^ENV HOME=(\S+) USER=\S+$", last) == ["/tmp"]
    assert "/opt/heterotrain/src" not in "".join(stages)


def test_both_images_build_the_same_wheel_by_the_same_steps() -> None:
    """So the second build takes the first one's layers."""
    stages = [(REPOSITORY / name / "Dockerfile").read_text().split("\nFROM ")[1] for name in ("operator", "trainer")]
    assert stages[0].rstrip() == stages[1].rstrip()
