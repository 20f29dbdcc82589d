"""The list of pinned releases fits go.mod and the toolchain, and only named plain files leave an archive."""

from __future__ import annotations

import io
import os
import re
import tarfile
from pathlib import Path

import pytest
from local_cluster import paths, releases, toolchain
from local_cluster.process import Problem


def archive(tmp_path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Return the path of a tar archive with these entries."""
    path = tmp_path / "archive"
    with tarfile.open(path, "w:gz") as tar:
        for entry, body in entries:
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, target, 0o6777
    return found


def test_only_named_plain_members_leave_an_archive(tmp_path: Path) -> None:
    path = archive(
        tmp_path,
        (entry("../outside"), b"!"),
        (entry("/tmp/absolute-member"), b"!"),
        (entry("bin", tarfile.SYMTYPE, "/etc"), b""),
        (entry("bin/tool"), b"right"),
        (entry("bin/other"), b"!"),
    )
    folder = tmp_path / "programs"
    folder.mkdir()
    releases.unpack(path, {"tool": "bin/tool"}, folder)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {"tool": b"right"}
    assert (folder / "tool").stat().st_mode & 0o7000 == 0, "no set-user-id bit of the archive"
    assert {each.name for each in tmp_path.iterdir()} == {"archive", "programs"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_member_that_is_no_plain_file_counts_as_missing(kind: bytes, tmp_path: Path) -> None:
    path = archive(tmp_path, (entry("tool", kind, "/etc/passwd"), b""))
    folder = tmp_path / "programs"
    folder.mkdir()
    with pytest.raises(Problem, match="the archive lacks tool"):
        releases.unpack(path, {"tool": "tool"}, folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("kept", [0, 1, 100, 4000])
def test_what_is_no_archive_is_one_sentence(kept: int, tmp_path: Path) -> None:
    whole = archive(tmp_path, (entry("tool"), os.urandom(5000)))
    whole.write_bytes(whole.read_bytes()[:kept])
    folder = tmp_path / "programs"
    folder.mkdir()
    with pytest.raises(Problem, match="cannot be unpacked"):
        releases.unpack(whole, {"tool": "tool"}, folder)


def required(module: Path) -> dict[str, str]:
    """Return the version of each module that a go.mod requires or replaces."""
    found: dict[str, str] = {}
    for line in (module / "go.mod").read_text().splitlines():
        words = line.partition("//")[0].split()
        if "=>" in words:
            found[words[0]] = words[-1]
        elif len(words) == 2 and words[1].startswith("v"):
            found.setdefault(words[0], words[1])
    return found


def test_releases_have_the_versions_that_are_compiled() -> None:
    own = required(paths.LOCAL)
    versions = {
        "dl.k8s.io": own["k8s.io/kubernetes"],
        "/etcd-io/etcd/": own["go.etcd.io/etcd/server/v3"],
        "/containerd/containerd/": own["github.com/containerd/containerd/v2"],
        # The module of Prometheus 3.15.0 is version 0.315.0.
        "/prometheus/prometheus/": re.sub(r"v0\.3(\d\d)\.", r"v3.\1.", own["github.com/prometheus/prometheus"]),
        "get.helm.sh": own["helm.sh/helm/v3"],
        "/yannh/kubeconform/": required(paths.LOCAL / "kubeconform")["github.com/yannh/kubeconform"],
        # The compiled one has a minor version more: the manifest says why.
        "/coredns/coredns/": own["github.com/coredns/coredns"].replace("v1.15.0", "v1.14.4"),
    }
    found = [
        each for machine in releases.ARCHITECTURES for each in releases.read(releases.MANIFEST.read_text(), machine)
    ]
    for file in (file for release in found for file in release.files):
        version = next(version for part, version in versions.items() if part in file.url)
        assert re.search(rf"\b{version}\b", file.url), file.url
        named = [path for path in file.members.values() if re.search(r"\d+\.\d+\.\d+", path)]
        assert all(version.removeprefix("v") in path for path in named), file.members


@pytest.mark.parametrize("machine", releases.ARCHITECTURES)
def test_a_release_has_every_name_of_what_it_replaces(machine: str) -> None:
    known = {program.name: program for program in (*toolchain.PROGRAMS, *toolchain.FOR_TESTS)}
    found = releases.read(releases.MANIFEST.read_text(), machine)
    assert {release.name for release in found} == {program.name for program in known.values()} - {
        "crane",  # small
        "pause",
        "containerd-shim-runc-v2",
        "ctr",
        "promtool",
    }
    for release in found:
        assert sorted(release.names) == sorted(name for each in release.replaces for name in known[each].files)
    sums = [file.sha256 for release in found for file in release.files]
    assert len({*sums}) == len(sums), "one sum was copied to another file"


GOOD = """[tools]
replaces = ["tool"]
[[tools.files]]
url = "https://example.org/{architecture}/tool"
sha256.amd64 = "%s"
""" % ("a" * 64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("https://", "ftp://"),
        ("https://", "http://"),
        ("a" * 64, "a" * 63),
        ("a" * 64, "sha256:" + "a" * 57),
        ('/tool"', '/.."'),
        ("sha256", "members = { '../tool' = 'tool' }\nsha256"),
        ("replaces =", "replace ="),
        ("[[tools.files]]", "[[tools.file]]"),
        ("[tools]", "[tools"),
        ('"a', "a"),
    ],
)
def test_a_damaged_manifest_is_one_sentence(old: str, new: str) -> None:
    assert len(releases.read(GOOD, "x86_64")) == 1
    with pytest.raises(Problem, match=r"releases\.toml is damaged"):
        releases.read(GOOD.replace(old, new, 1), "x86_64")
