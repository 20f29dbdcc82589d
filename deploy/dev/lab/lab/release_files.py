"""``make release VERSION=…``: what a release publishes, made from the newest commit on this machine; nothing is pushed.

The steps are those of the workflow ``release``: names, wheel, chart, manifest, plugin, notes, checksums. Images, bills
of materials and signatures need the registries and identities that only the workflow has.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lab import chart_files, release_names
from lab.cluster import REPOSITORY


def notes(changelog: str, version: str) -> str:
    """Return the changes of a version, or those that are not released yet; empty without any."""
    for title in (rf"\[?{re.escape(version)}\]?[^\n]*", "Unreleased"):
        if found := re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL):
            return found[1].strip() + "\n"
    return ""


def make(version: str, *, registry: str, source: str, out: Path) -> list[str]:
    """Fill a folder with the files of a release; return what is missing, each in a sentence.

    Raises:
        ReleaseError: the sources do not have this version, or cannot get the names of a release.
    """
    release = release_names.Release(version=version, registry=registry, source=source)
    out.mkdir(parents=True)
    missing = ["images, bills of materials and signatures are made by the workflow `release`"]
    with tempfile.TemporaryDirectory(prefix="heterotrain-release-") as folder:
        root = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True).stdout
        (root / "sources.tar").write_bytes(archive)
        with tarfile.open(root / "sources.tar") as tar:
            tar.extractall(root, filter="data")
        release_names.rename(root, release)
        release_names.write_files(root, release, out)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        subprocess.run(build, cwd=root, check=True, capture_output=True)
        if Path(chart_files.helm()).exists():
            chart = [chart_files.helm(), "package", "helm/heterotrain", "--destination", str(out)]
            subprocess.run(chart, cwd=root, check=True, capture_output=True)
        else:
            missing.append("the chart needs helm: `make images` brings it")
        (out / "NOTES.md").write_text(notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version))
    files = sorted(path for path in out.iterdir() if path.is_file())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return missing


def main() -> int:
    """Make the files and list them; return the exit code."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("version", help="such as 0.1.0")
    parser.add_argument(
        "--registry", default="localhost:5000/heterotrain", help="registry and owner of images and chart"
    )
    parser.add_argument("--source", default="https://github.com/OWNER/heterotrain", help="the repository's page")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/release", help="folder, which is emptied first")
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    try:
        missing = make(given.version, registry=given.registry, source=given.source, out=given.out)
    except release_names.ReleaseError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    for path in sorted(given.out.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path}")
    for each in missing:
        print(f"not here: {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
