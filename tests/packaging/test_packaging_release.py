"""A release fits together: chart, manifest, plugin and wheel name what the same workflow publishes.

The steps of the workflow run here as they are, on a copy of the sources. Programs that push or sign are recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from heterotrain_core.version import __version__
from lab import release_files, release_images, release_names, release_rehearsal
from lab.bill_of_materials import bill
from local_cluster import assembly, oci
from local_cluster.process import Problem
from support.helm import helm, of_kind
from support.ports import free_port
from support.programs import program
from support.wheels import built

ROOT = Path(__file__).parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
SOURCE = "https://github.com/Some-Owner/heterotrain"
ENVIRONMENT = {
    "GITHUB_REF_NAME": f"v{__version__}",
    "GITHUB_REPOSITORY": "Some-Owner/heterotrain",
    "GITHUB_REPOSITORY_OWNER": "Some-Owner",
    "GITHUB_SERVER_URL": "https://github.com",
    "REGISTRY": "ghcr.io",
}
"""What GitHub gives to a workflow. Registries refuse the capital letters of this owner."""
DIGEST = f"sha256:{7:064}"
RECORDER = f"""#!{sys.executable}
import json, os, pathlib, sys
words = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(words) + "\\n")
if "--metadata-file" in words:
    described = {{"containerimage.descriptor": {{"digest": "sha256:other"}}, "containerimage.digest": "{DIGEST}"}}
    pathlib.Path(words[words.index("--metadata-file") + 1]).write_text(json.dumps(described))
"""


def step(job: str, name: str) -> str:
    """Return the script of a workflow's step whose name begins with ``name``."""
    (found,) = [each for each in JOBS[job]["steps"] if each.get("name", "").startswith(name)]
    return str(found["run"])


def recorded(tmp_path: Path, script: str, *programs: str, **environment: str) -> list[list[str]]:
    """Run a script as GitHub does, and return the calls of programs that only write down how they were called."""
    (tmp_path / "bin").mkdir()
    for name in programs:
        (tmp_path / "bin" / name).write_text(RECORDER)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    variables = {**ENVIRONMENT, **environment, "PATH": path, "RECORD": str(tmp_path / "calls")}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=variables, check=True)
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def calls_for(tmp_path: Path, entry: dict[str, str]) -> list[list[str]]:
    """Return what the job of an image calls for one entry of its matrix."""
    (found,) = [each for each in JOBS["image"]["steps"] if each.get("name", "").startswith("Build, push")]
    known = {"env.REGISTRY": "ghcr.io", "github.repository_owner": "Some-Owner"}
    known |= {f"matrix.{key}": value for key, value in entry.items()}
    environment: dict[str, str] = {}
    for name, text in found["env"].items():
        environment[name] = re.sub(r"\$\{\{ (\S+) \}\}", lambda word: known[word[1]], text)
    tmp_path.mkdir()
    return recorded(tmp_path, str(found["run"]), "docker", "syft", "cosign", **environment)


@pytest.fixture
def pushed(tmp_path: Path) -> set[str]:
    """All images that the release pushes, with their tags."""
    entries = JOBS["image"]["strategy"]["matrix"]["include"]
    calls = [call for n, entry in enumerate(entries) for call in calls_for(tmp_path / str(n), entry)]
    builds = [call for call in calls if call[:3] == ["docker", "buildx", "build"] and "--push" in call]
    assert len(builds) == len(entries)
    return {build[build.index("-t") + 1] for build in builds}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources after the step that gives them the names of the release."""
    root = tmp_path_factory.mktemp("released")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for path in tracked.stdout.split():
        if not path.startswith(("tests/", "docs/benchmarks")) and (ROOT / path).is_file():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, root / path)
    script = step("files", "Give the sources the names")
    assert ".venv/bin/python" in script
    script = script.replace("make setup-core", "").replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=root, env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root


def images_of(objects: list[dict[str, Any]]) -> set[str]:
    """Return the images of all pods that these objects are or make."""
    pods = [each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment")]
    pods += [each["spec"] for each in of_kind(objects, "Pod")]
    assert pods
    return {container["image"] for pod in pods for container in pod["containers"]}


@pytest.mark.needs_program("helm")
def test_a_default_install_pulls_an_image_that_the_release_pushes(released: Path, pushed: set[str]) -> None:
    done = helm("template", "heterotrain", str(released / "helm/heterotrain"), "--kube-version", "1.36.0")
    assert done.returncode == 0, done.stderr
    found = images_of([each for each in yaml.safe_load_all(done.stdout) if each])
    assert found == {f"ghcr.io/some-owner/heterotrain-operator:{__version__}"}
    assert found <= pushed


def test_manifest_and_metadata_name_the_same_image(released: Path, pushed: set[str]) -> None:
    objects = list(yaml.safe_load_all((released / "out/heterotrain.yaml").read_text()))
    about = yaml.safe_load((released / "helm/heterotrain/Chart.yaml").read_text())
    listed = {each["image"] for each in yaml.safe_load(about["annotations"]["artifacthub.io/images"])}
    assert images_of(objects) == listed
    assert listed <= pushed


def test_nothing_of_a_release_keeps_a_name_without_a_registry(released: Path) -> None:
    published = [*(released / "helm").rglob("*"), *(released / "out").glob("*.yaml"), released / "README.md"]
    names = re.compile(rf"(?<![\w./-]){release_names.SOURCE_IMAGE}\b")
    assert [str(path) for path in published if path.is_file() and names.search(path.read_text())] == []
    assert any(names.search(path.read_text()) for path in (ROOT / "helm").rglob("*") if path.is_file())


def test_every_image_has_both_platforms_and_is_signed_and_listed_by_the_digest_of_its_index(tmp_path: Path) -> None:
    for n, entry in enumerate(JOBS["image"]["strategy"]["matrix"]["include"]):
        build, *after = calls_for(tmp_path / str(n), entry)
        assert build[build.index("--platform") + 1] == "linux/amd64,linux/arm64"
        assert ("--build-arg" in build) == bool(entry["requirements"])
        name = f"ghcr.io/some-owner/{entry['image']}@{DIGEST}"
        assert after[0] == ["cosign", "sign", "--yes", "--recursive", name]
        assert [call[1:4] for call in after if call[0] == "syft"] == [
            [f"registry:{name}", "--platform", platform] for platform in ("linux/amd64", "linux/arm64")
        ]
        assert [call[-1] for call in after if call[:2] == ["cosign", "attest"]] == [name, name]


def test_the_plugin_installs_the_package_that_the_release_publishes(released: Path) -> None:
    manifest = yaml.safe_load((released / "out/htj.yaml").read_text())
    (platform,) = manifest["spec"]["platforms"]
    attached = urlsplit(platform["uri"]).path.rpartition("/")[2]
    assert platform["uri"] == f"{SOURCE}/releases/download/v{__version__}/{attached}"
    assert (released / "out" / attached).exists(), "the release attaches all files of this folder"
    assert "out/*" in step("release", "Publish")
    publish = step("pypi", "Publish")
    assert "uv publish --trusted-publishing always out/*.whl" in publish
    project = tomllib.loads((released / "pyproject.toml").read_text())["project"]
    assert f"{project['name']}[cli]==" in (released / "deploy/krew/kubectl-htj").read_text()


def test_the_published_wheel_names_pages_that_exist(released: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built(released, tmp_path)) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    assert f"Project-URL: Homepage, {SOURCE}\n" in text
    assert f"**Alpha: version {__version__}.**" in text
    assert re.findall(r"no version is released|install '\.|helm install \S+ helm/", text) == []
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert_pages_exist(links)


def test_the_pages_of_the_chart_exist(released: Path) -> None:
    about = yaml.safe_load((released / "helm/heterotrain/Chart.yaml").read_text())
    readme = (released / "helm/heterotrain/README.md").read_text()
    listed = [each["url"] for each in yaml.safe_load(about["annotations"]["artifacthub.io/links"])]
    assert (about["home"], about["sources"]) == (SOURCE, [SOURCE])
    assert_pages_exist([about["icon"], *listed, *re.findall(r"\]\(([^)\s]+)\)", readme)])
    assert "oci://ghcr.io/some-owner/charts/heterotrain -n heterotrain-system --create-namespace" in readme
    assert f"--version {__version__}" in readme
    assert "oci://${CHARTS,,}" in step("files", "Push the chart")


def test_the_chart_is_claimed_on_artifact_hub_where_its_owner_has_registered_it(tmp_path: Path) -> None:
    """The names are those of https://artifacthub.io/docs/topics/repositories/helm-charts/#oci-support."""
    (claim,) = [each for each in JOBS["files"]["steps"] if each.get("name", "").startswith("Claim")]
    assert claim["if"] == "vars.ARTIFACTHUB_REPOSITORY_ID != ''"
    given = {"CHARTS": "ghcr.io/Some-Owner/charts", "ID": "1234", "TOKEN": "t", "GITHUB_ACTOR": "a"}
    *_, push = recorded(tmp_path, str(claim["run"]), "go", "oras", ORAS_VERSION="v1", **given)
    assert push[:3] == ["oras", "push", "ghcr.io/some-owner/charts/heterotrain:artifacthub.io"]
    assert "artifacthub-repo.yml:application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml" in push
    assert yaml.safe_load((tmp_path / "artifacthub-repo.yml").read_text()) == {"repositoryID": 1234}


def assert_pages_exist(links: list[str]) -> None:
    """Check that each address of this version's files belongs to a file of the sources."""
    files = re.compile(rf"{SOURCE}/(?:blob|raw)/v{re.escape(__version__)}/([^#]+)")
    own = [known[1] for link in links if (known := files.match(link))]
    assert own
    assert [path for path in own if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("path", "old", "new", "reason"),
    [
        ("core/heterotrain_core/version.py", __version__, "9.9.9", "has 9.9.9"),
        ("helm/heterotrain/Chart.yaml", f"\nversion: {__version__}", "\nversion: 9.9.9", "version of helm"),
        ("helm/heterotrain/values.yaml", "heterotrain/operator", "other/operator", "occurs 0 times instead of once"),
        ("pyproject.toml", "[project.scripts]", "[project.urls]\n[project.scripts]", "start from a new checkout"),
    ],
)
def test_sources_that_cannot_become_this_release_are_refused(
    tmp_path: Path, path: str, old: str, new: str, reason: str
) -> None:
    for each in (
        "core/heterotrain_core/version.py", "helm/heterotrain/Chart.yaml", "helm/heterotrain/values.yaml",
        "helm/heterotrain/README.md", "deploy/manifest/heterotrain.yaml", "pyproject.toml", "README.md",
    ):  # fmt: skip
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / each, tmp_path / each)
    assert old in (tmp_path / path).read_text()
    (tmp_path / path).write_text((tmp_path / path).read_text().replace(old, new))
    before = {each: each.read_text() for each in tmp_path.rglob("*") if each.is_file()}
    release = release_names.Release(version=__version__, registry="ghcr.io/o", source=SOURCE)
    with pytest.raises(release_names.ReleaseError, match=reason):
        release_names.rename(tmp_path, release)
    assert {each: each.read_text() for each in tmp_path.rglob("*") if each.is_file()} == before


def test_a_tag_that_is_not_the_version_stops_the_release_before_anything_is_pushed() -> None:
    script = step("version", "The tag is the version")
    for tag, code in ((f"v{__version__}", 0), ("v9.9.9", 1)):
        done = subprocess.run(["bash", "-e", "-c", script], cwd=ROOT, env={"GITHUB_REF_NAME": tag}, check=False)
        assert done.returncode == code
    assert "version" in JOBS["image"]["needs"]


LOCK = """numpy==2.0.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
nvidia-nccl-cu12==2.27.5 ; platform_machine == 'x86_64' and sys_platform == 'linux' \\
    --hash=sha256:cc
"""


@pytest.mark.needs_program("helm")
def test_the_files_of_a_release(tmp_path: Path) -> None:
    out = tmp_path / "out"
    release = release_names.Release(version=__version__, registry="localhost:5000/me", source=SOURCE)
    release_files.make(release, out, lock=LOCK, chosen=(), platforms=())
    assert {path.name.replace(__version__, "V").partition("-py3")[0] for path in out.iterdir()} == {
        "NOTES.md", "SHA256SUMS", "heterotrain-V", "heterotrain-V.tgz", "heterotrain.cdx.json", "heterotrain.yaml",
        "htj.yaml", "kubectl-htj.tar.gz",
    }  # fmt: skip
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    assert "localhost:5000/me/heterotrain-operator" in (out / "heterotrain.yaml").read_text()
    other = release_names.Release(version="9.9.9", registry="r", source=SOURCE)
    with pytest.raises(release_names.ReleaseError, match=r"9\.9\.9"):
        release_files.make(other, tmp_path / "other", lock=LOCK, chosen=(), platforms=())


def test_a_bill_lists_what_an_architecture_gets() -> None:
    status = "Package: dash\nStatus: install ok unpacked\nArchitecture: arm64\nVersion: 0.5+b1\n\n"
    for architecture, names in (("amd64", ["numpy", "nvidia-nccl-cu12"]), ("arm64", ["numpy"])):
        parts = bill("image", "1.0", lock=LOCK, architecture=architecture, dpkg_status=status)["components"]
        assert [part["name"] for part in parts] == [*names, "dash"]
    numpy, *_, dash = parts
    (file,) = numpy["externalReferences"]
    assert numpy["purl"] == "pkg:pypi/numpy@2.0.0"
    assert [each["content"] for each in file["hashes"]] == ["aa", "bb"]
    assert dash["purl"] == "pkg:deb/debian/dash@0.5%2Bb1?arch=arm64&distro=bookworm"


def wheel_for(folder: Path, machine: str) -> str:
    """Write a wheel that says for which machine it is, and return its hash."""
    path = folder / f"small-1.0-py3-none-manylinux_2_17_{machine}.whl"
    about = "small-1.0.dist-info"
    files = {"small/__init__.py": f"MACHINE = {machine!r}\n", f"{about}/METADATA": "Name: small\nVersion: 1.0\n"}
    files[f"{about}/WHEEL"] = f"Wheel-Version: 1.0\nTag: py3-none-manylinux_2_17_{machine}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.needs_program("crane")
@pytest.mark.skipif(sys.version_info[:2] != assembly.BASE_PYTHON, reason="images have the Python of their base")
def test_an_image_of_both_architectures_is_pushed_and_pulled_with_the_wheels_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crane = program("crane")
    assert crane is not None
    monkeypatch.setenv("PATH", f"{Path(crane).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HETEROTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(release_images, "_base", lambda architecture: oci.write_layer(
        lambda tar: oci.add_text(tar, "./var/lib/dpkg/status", f"Package: base\nStatus: ok\nVersion: 1\nArchitecture: "
        f"{architecture}\n")
    ))  # fmt: skip
    for folder in ("wheels", "root/requirements", "root/operator", "out"):
        (tmp_path / folder).mkdir(parents=True)
    hashes = [wheel_for(tmp_path / "wheels", machine) for machine in ("x86_64", "aarch64")]
    lock = " \\\n".join(["small==1.0", *(f"    --hash=sha256:{each}" for each in hashes)])
    (tmp_path / "root/requirements/operator.txt").write_text(lock)
    shutil.copy(ROOT / "operator/Dockerfile", tmp_path / "root/operator")
    release_images.make(
        "operator", ("amd64", "arm64"), root=tmp_path / "root", wheel=built(ROOT, tmp_path), version="1.0",
        out=tmp_path / "out",
    )  # fmt: skip
    release = release_names.Release(version="1.0", registry=f"localhost:{free_port()}/me", source=SOURCE)
    with release_rehearsal.registry(release, tmp_path / "out"):
        release_rehearsal.push_images(release, tmp_path / "out")
        for architecture, machine in (("amd64", "x86_64"), ("arm64", "aarch64")):
            pulled = tmp_path / f"{architecture}.tar"
            command = [crane, "export", f"{release.image}:1.0", pulled, "--platform", f"linux/{architecture}"]
            subprocess.run(command, check=True, capture_output=True)
            with tarfile.open(pulled) as tar:
                source = tar.extractfile(f"{assembly.SITE}/small/__init__.py")
                assert source is not None
                assert machine in source.read().decode()
                assert f"{assembly.SITE}/heterotrain_operator/entry.py" in tar.getnames()
            parts = json.loads((tmp_path / f"out/heterotrain-operator-{architecture}.cdx.json").read_text())
            assert [part["name"] for part in parts["components"]] == ["small", "base"]


def test_nothing_is_pushed_beyond_this_machine(tmp_path: Path) -> None:
    release = release_names.Release(version="1.0", registry="ghcr.io/me", source=SOURCE)
    with pytest.raises(Problem, match="loopback only"), release_rehearsal.registry(release, tmp_path):
        pass


def test_notes_are_those_of_the_version_or_of_what_is_not_released() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0 (2026-12-01)\n\n- first\n"
    assert [release_files.notes(text, version) for version in ("0.1.0", "0.2.0")] == ["- first\n", "- new\n"]
