"""Images from the environment: the files and settings that the Dockerfiles give, in layers that are what they say."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import marshal
import re
import sys
import tarfile
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from lab.cluster import REPOSITORY
from local_cluster import assembly, images, oci, paths
from local_cluster.process import Problem

PACKAGES = ("packaging", "pluggy", "typer")
SITE = assembly.SITE

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != assembly.BASE_PYTHON, reason="images are assembled by the Python of their base only"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("HETEROTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lock_of(tmp_path: Path, *more: str) -> Path:
    """Return a lock of small packages that the tests' environment has."""
    path = tmp_path / "lock.txt"
    pins = [f"{name}=={importlib.metadata.version(name)} \\\n    --hash=sha256:00" for name in PACKAGES]
    path.write_text("\n".join([*pins, *more]) + "\n")
    return path


def image(tmp_path: Path, *more: str, leave_out: str = "") -> images.Image:
    return images.Image(
        name="small:dev",
        dockerfile=REPOSITORY / "trainer/Dockerfile",
        inputs=(REPOSITORY / "trainer/Dockerfile", lock_of(tmp_path, *more)),
        lock=tmp_path / "lock.txt",
        arguments={"LEAVE_OUT": leave_out} if leave_out else {},
        without=images.NOT_IN_PODS,
    )


@pytest.fixture(scope="module")
def assembled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small image: the cache that has it, and its manifest's digest."""
    folder = tmp_path_factory.mktemp("assembled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROTRAIN_CACHE", str(folder / "cache"))
        return folder / "cache", assembly.build(image(folder), base)


@pytest.fixture
def manifest(assembled: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The small image, in the cache in use."""
    monkeypatch.setenv("HETEROTRAIN_CACHE", str(assembled[0]))
    return assembled[1]


def base() -> oci.Blob:
    """Return a base without Debian."""
    return oci.kept("base", lambda: oci.write_layer(lambda tar: oci.add_text(tar, "etc/os-release", "small")))


def read(digest: str) -> Any:
    return json.loads(oci.blob(digest).read_text())


def entries(digest: str) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    """Return the entries of a layer with their contents."""
    with tarfile.open(oci.blob(digest)) as tar:
        return {
            each.name: (each, ((tar.extractfile(each) if each.isreg() else None) or io.BytesIO()).read())
            for each in tar
        }


def layers_of(manifest: str) -> list[dict[str, tuple[tarfile.TarInfo, bytes]]]:
    return [entries(layer["digest"]) for layer in read(manifest)["layers"]]


def test_an_image_has_the_locks_packages_and_the_projects_wheel(manifest: str) -> None:
    _, packages, wheel = layers_of(manifest)
    folders = {name.removeprefix(f"{SITE}/").partition("/")[0] for name in packages if name.startswith(f"{SITE}/")}
    expected = {str(each).partition("/")[0] for name in PACKAGES for each in importlib.metadata.files(name) or ()}
    assert folders == expected - {".."}, "all that the lock names, and nothing else of the environment"
    own = {name.removeprefix(f"{SITE}/").partition("/")[0] for name in wheel if name.startswith(f"{SITE}/")}
    assert {name for name in own if not name.endswith(".dist-info")} == {"heterotrain", "heterotrain_core"}
    assert any(name.endswith(".dist-info/METADATA") for name in wheel)
    everything = packages | wheel
    assert {entry.uid for entry, _ in everything.values()} == {0}
    assert {entry.mode for entry, _ in everything.values()} == {0o644, 0o755, 0o777}
    assert {name for name, (entry, _) in everything.items() if entry.mode == 0o777} == {
        f"opt/heterotrain/{name}" for name in ("bin/python", "bin/python3", "bin/python3.11", "lib64")
    }


def test_programs_begin_with_the_images_python(manifest: str) -> None:
    _, packages, wheel = layers_of(manifest)
    programs = {name: found for name, found in (packages | wheel).items() if name.startswith("opt/heterotrain/bin/")}
    assert {"opt/heterotrain/bin/typer", "opt/heterotrain/bin/heterotrain-run"} <= {*programs}
    assert not [name for name in programs if "operator" in name or "kubectl" in name], "their packages are left out"
    for entry, text in programs.values():
        if entry.isreg():
            assert text.startswith(b"#!/opt/heterotrain/bin/python\n")
            compile(text, entry.name, "exec")
    configuration = packages["opt/heterotrain/pyvenv.cfg"][1].decode()
    assert "home = /usr/bin\n" in configuration


def test_bytecode_fits_its_source_and_is_never_checked(manifest: str) -> None:
    _, packages, wheel = layers_of(manifest)
    everything = packages | wheel
    modules = [name for name in everything if name.endswith(".py")]
    assert len(modules) > 100
    for name in modules:
        folder, _, file = name.rpartition("/")
        bytecode = everything[f"{folder}/__pycache__/{file.removesuffix('.py')}.cpython-311.pyc"][1]
        assert bytecode[:4] == importlib.util.MAGIC_NUMBER
        assert bytecode[4] == 1, "unchecked"
        assert bytecode[8:16] == importlib.util.source_hash(everything[name][1])
        code = marshal.loads(bytecode[16:])  # noqa: S302  # it was written a moment ago
        assert isinstance(code, CodeType)
        assert code.co_filename == f"/{name}", "tracebacks name the file in the image"


def test_every_blob_is_what_its_digest_says(manifest: str) -> None:
    document = read(manifest)
    parts = [document["config"], *document["layers"]]
    for digest, size in [(manifest, None), *((part["digest"], part["size"]) for part in parts)]:
        content = oci.blob(digest).read_bytes()
        assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert size in (None, len(content))
    assert read(document["config"]["digest"])["rootfs"]["diff_ids"] == [each["digest"] for each in document["layers"]]


def test_an_archive_has_all_blobs_but_those_that_the_reader_has(manifest: str) -> None:
    oci.mark("small:dev").write_text(json.dumps({"manifest": manifest}))
    known = read(manifest)["layers"][0]["digest"]
    target = io.BytesIO()
    oci.archive("small:dev", "docker.io/heterotrain/small:dev", without={known})(target)
    target.seek(0)
    with tarfile.open(fileobj=target) as tar:
        names = tar.getnames()
        (index,) = json.loads((tar.extractfile("index.json") or io.BytesIO()).read())["manifests"]
    blobs = {f"blobs/{digest.replace(':', '/')}" for digest in oci.blobs_of(manifest)}
    assert {*names} == {"oci-layout", "index.json"} | blobs - {f"blobs/{known.replace(':', '/')}"}
    assert (index["digest"], index["size"]) == (manifest, oci.blob(manifest).stat().st_size)
    assert index["annotations"] == {"io.containerd.image.name": "docker.io/heterotrain/small:dev"}


def test_packages_that_are_left_out_and_other_platforms_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_wheel", lambda _without: base())
    needless = ("no-such-package==1.0 \\", "colorama==0.1 ; sys_platform == 'win32' \\")
    assert not assembly.serves(image(tmp_path, *needless))
    built = image(tmp_path, *needless, leave_out="no-such|typer==")
    assert assembly.serves(built)
    packages = layers_of(assembly.build(built, base))[1]
    assert f"{SITE}/pluggy/__init__.py" in packages
    assert not any("typer" in name for name in packages)


@pytest.mark.parametrize("line", ["pluggy==0.0.1 \\", "no-such-package==1.0 \\"])
def test_an_environment_with_other_packages_does_not_serve(line: str, tmp_path: Path) -> None:
    assert assembly.serves(image(tmp_path))
    assert not assembly.serves(image(tmp_path, line))


def test_a_package_that_has_lost_a_file_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> list[tuple[str, Path]]:
        return [("pluggy/__init__.py", tmp_path / "gone")]

    monkeypatch.setattr(assembly, "_files", lost)
    assert not assembly.serves(image(tmp_path))


def test_an_image_is_built_again_where_an_input_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(*_: object) -> str:
        built.append("built")
        return oci.write_manifest([], {"User": str(len(built))})

    monkeypatch.setattr(assembly, "build", build)
    small = image(tmp_path)
    assert images.build(small) == images.build(small)
    assert len(built) == 1, "nothing has changed"
    with (tmp_path / "lock.txt").open("a") as lock:
        lock.write("# changed\n")
    images.build(small)
    assert len(built) == 2
    left = {f"sha256:{path.name}" for path in oci.blob("sha256:x").parent.iterdir()}
    assert left == {*oci.blobs_of(images.build(small))}, "blobs of older versions are gone"


def test_an_environment_that_does_not_serve_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"this Python is not 3\.11 or lacks packages of"):
        images.build(image(tmp_path, "no-such-package==1.0 \\"))


@pytest.mark.parametrize("name", ["operator", "trainer"])
def test_the_settings_are_those_of_the_dockerfile(name: str) -> None:
    text = (REPOSITORY / name / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    found = assembly.settings(text)
    assert not found.is_empty
    variables = re.findall(r"(?m)^ENV (.*)$", last)
    assert found.config["Env"] == " ".join(variables).split()
    assert found.config["User"] == "65532:65532"
    start = {"operator": ("Cmd", ["heterotrain-operator", "run"]), "trainer": ("Entrypoint", ["heterotrain-run"])}[name]
    assert found.config[start[0]] == start[1]
    assert len(found.config) == 3


def test_an_image_has_the_lock_that_its_dockerfile_installs() -> None:
    for each in images.own():
        assert each.lock is not None
        assert each.lock in each.inputs, "another lock is another image"
        last = each.dockerfile.read_text().rpartition("\nFROM ")[2]
        default = re.search(r"(?m)^ARG REQUIREMENTS=(\S+)$", last) or re.search(r"(requirements/operator\.txt)", last)
        assert default is not None
        assert REPOSITORY / default[1] == each.lock


def test_an_image_from_nothing_has_the_files_that_it_copies(tmp_path: Path) -> None:
    (tmp_path / "pause").write_bytes(b"program")
    (tmp_path / "pause").chmod(0o755)
    (small,) = (each for each in images.of_cluster() if each.name == "pause:local")
    pause = images.Image(name=small.name, dockerfile=small.dockerfile, inputs=(), context=tmp_path)
    manifest = assembly.build(pause, base)
    ((name, (entry, content)),) = layers_of(manifest)[0].items()
    assert (name, entry.mode, content, len(read(manifest)["layers"])) == ("pause", 0o755, b"program", 1)
    config = read(read(manifest)["config"]["digest"])["config"]
    assert config == {"User": "65532:65532", "Entrypoint": ["/pause"]}


@pytest.mark.parametrize("line", ["WORKDIR /work", "HEALTHCHECK NONE", "ADD x /"])
def test_an_instruction_that_would_be_lost_is_refused(line: str) -> None:
    text = (paths.LOCAL / "pause/Dockerfile").read_text()
    assert assembly.settings(text).is_empty
    with pytest.raises(Problem, match=f"a Dockerfile's {line.partition(' ')[0]} is not known"):
        assembly.settings(f"{text}{line}\n")


def test_the_dockerfile_leaves_out_the_same_packages() -> None:
    dockerfile = (REPOSITORY / "trainer/Dockerfile").read_text()
    (names,) = re.findall(r"for each in ([a-z ]+); do rm -r \S+/heterotrain_\$each", dockerfile)
    assert tuple(f"heterotrain_{name}" for name in names.split()) == images.NOT_IN_PODS
