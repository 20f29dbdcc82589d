"""``make release VERSION=…``: a whole release on this machine, from the newest commit; nothing leaves the machine.

It makes what the workflow ``release`` makes: wheel, chart, manifest, plugin, images for amd64 and arm64, bills of
materials, notes and checksums. It pushes chart and images into a registry on loopback and then runs the commands of the
released README against it (``lab.release_rehearsal``). Signatures need the identity that only the workflow has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from local_cluster import record, toolchain
from local_cluster.process import Problem, run

from lab import chart_files, release_images, release_names, release_rehearsal
from lab.bill_of_materials import bill
from lab.cluster import REPOSITORY

EXTRAS = ("operator", "trainer", "tensorboard", "cli", "export")
"""Extras whose packages the wheel's bill lists."""


def notes(changelog: str, version: str) -> str:
    """Return the changes of a version, or those that are not released yet; empty without any."""
    for title in (rf"\[?{re.escape(version)}\]?[^\n]*", "Unreleased"):
        if found := re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL):
            return found[1].strip() + "\n"
    return ""


def make(
    release: release_names.Release, out: Path, *, lock: str, chosen: Sequence[str], platforms: Sequence[str]
) -> None:
    """Fill a folder with the files of a release, and with these images for these platforms.

    The lock has what the extras of the wheel need, and gives its bill.

    Raises:
        ReleaseError: the sources do not have this version, or cannot get the names of a release.
        Problem: a program or a package cannot be had.
    """
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="heterotrain-release-") as folder:
        root = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True).stdout
        (root / "sources.tar").write_bytes(archive)
        with tarfile.open(root / "sources.tar") as tar:
            tar.extractall(root, filter="data")
        release_names.rename(root, release)
        release_names.write_files(root, release, out)
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=root)
        run(chart_files.helm(), "package", "helm/heterotrain", "--destination", out, cwd=root)
        (out / "NOTES.md").write_text(notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), release.version))
        parts = bill("heterotrain", release.version, lock=lock)
        (out / "heterotrain.cdx.json").write_text(json.dumps(parts, indent=1), encoding="utf-8")
        (wheel,) = out.glob("*.whl")
        for name in chosen:
            release_images.make(name, tuple(platforms), root=root, wheel=wheel, version=release.version, out=out)
    files = sorted(path for path in out.iterdir() if path.is_file())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums, encoding="utf-8")


def locked() -> str:
    """Return what the extras of the wheel need, in the versions that all tests run with, with hashes.

    Raises:
        Problem: the index of packages does not answer.
    """
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--universal"]
    command += ["--generate-hashes", "--python-version", "3.11", "--no-header", "--no-annotate", "--no-emit-index-url"]
    extras = [word for each in EXTRAS for word in ("--extra", each)]
    return run(*command, *extras, "-c", "requirements/dev.txt", "pyproject.toml", cwd=REPOSITORY)


def main() -> int:
    """Make a release and rehearse it; return the exit code."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("version", help="such as 0.1.0")
    parser.add_argument("--registry", default="localhost:5000/heterotrain", help="on loopback: host, port and owner")
    parser.add_argument("--source", default="https://github.com/OWNER/heterotrain", help="the repository's page")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/release", help="folder, which is emptied first")
    parser.add_argument("--images", nargs="*", default=tuple(release_images.IMAGES), choices=release_images.IMAGES)
    parser.add_argument("--platforms", nargs="+", default=("amd64", "arm64"), choices=("amd64", "arm64"))
    given = parser.parse_args()
    release = release_names.Release(version=given.version, registry=given.registry, source=given.source)
    shutil.rmtree(given.out, ignore_errors=True)
    try:
        with record.building("make release"):
            toolchain.build_programs(toolchain.REGISTRY, base=(toolchain.HELM,))
            make(release, given.out, lock=locked(), chosen=given.images, platforms=given.platforms)
        with release_rehearsal.registry(release, given.out):
            release_rehearsal.push_images(release, given.out)
            release_rehearsal.push_chart(release, given.out)
            left_out = release_rehearsal.rehearse(release, given.out)
    except (release_names.ReleaseError, Problem) as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    for path in sorted(given.out.iterdir()):
        if path.is_file():
            print(f"{path.stat().st_size:>10,}  {path}")
    for each in (*left_out, "nothing was signed: signatures are made by the workflow `release`"):
        print(f"not done here: {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
