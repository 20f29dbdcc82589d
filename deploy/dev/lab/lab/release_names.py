"""Names of a release: in the sources, images and links have names without a registry and without a host.

The release workflow runs this on its checkout before it packages anything. Afterwards chart, manifest, krew plugin and
wheel name the images, packages and pages that the release publishes, and nothing else.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

SOURCE_IMAGE: Final = "heterotrain/operator"
"""The operator's image in the sources; emulated clusters use it as it is."""
VERSION_FILE: Final = "core/heterotrain_core/version.py"
_VERSION = re.compile(r'__version__: Final = "([^"]+)"')
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
_PICTURES = (".svg", ".png")


class ReleaseError(Exception):
    """The sources cannot become this release; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Where a release is published.

    Attributes:
        version: without the tag's ``v``.
        registry: registry and owner of images and chart, such as ``ghcr.io/owner``; registries want lower case.
        source: address of the repository's page, without a slash at its end.
    """

    version: str
    registry: str
    source: str

    @property
    def image(self) -> str:
        """The operator's image, without a tag."""
        return f"{self.registry.lower()}/heterotrain-operator"

    @property
    def chart(self) -> str:
        """The chart, as helm installs it."""
        return f"oci://{self.registry.lower()}/charts/heterotrain"

    def page(self, path: str) -> str:
        """Return the address of a file of the sources; for a picture, that of the file itself."""
        kind = "raw" if path.partition("#")[0].endswith(_PICTURES) else "blob"
        return f"{self.source}/{kind}/v{self.version}/{path}"

    def file(self, name: str) -> str:
        """Return the address of a file that the release has attached."""
        return f"{self.source}/releases/download/v{self.version}/{name}"


def values(text: str, release: Release) -> str:
    """Return the chart's ``values.yaml`` with the released image as its default."""
    return _replace(text, f"  repository: {SOURCE_IMAGE}\n", f"  repository: {release.image}\n")


def chart(text: str, release: Release) -> str:
    """Return ``Chart.yaml`` with the released image, and with the pages that Artifact Hub links to."""
    links = (("Documentation", "README.md"), ("Fields of a job", "docs/fields.md"), ("Changes", "CHANGELOG.md"))
    text = _replace(text, f"image: {SOURCE_IMAGE}:", f"image: {release.image}:")
    pages = [
        f"home: {release.source}",
        f"icon: {release.page('docs/pictures/icon.svg')}",
        f"sources: [{release.source}]",
        "annotations:",
        "  artifacthub.io/links: |",
        *(f"    - {{name: {name}, url: '{release.page(path)}'}}" for name, path in links),
        f"    - {{name: Support, url: '{release.source}/issues'}}",
    ]
    return _replace(text, "\nannotations:\n", "\n" + "\n".join(pages) + "\n")


def chart_readme(text: str, release: Release) -> str:
    """Return the chart's README: it installs the released chart, and its links work on other pages."""
    text = _replace(text, "helm install heterotrain helm/heterotrain ", f"helm install heterotrain {release.chart} ")
    text = _replace(
        text, "  --set image.repository=REGISTRY/heterotrain-operator \\\n", f"  --version {release.version} \\\n"
    )
    text = _replace(text, f'`"{SOURCE_IMAGE}"`', f'`"{release.image}"`')
    text = _replace(text, "deploy/manifest/heterotrain.yaml`", f"{release.file('heterotrain.yaml')}`")
    return links(text, "helm/heterotrain", release)


def links(text: str, folder: str, release: Release) -> str:
    """Return Markdown whose relative links, seen from a folder of the sources, are addresses of the release's files."""

    def absolute(link: re.Match[str]) -> str:
        return f"]({release.page(posixpath.normpath(posixpath.join(folder, link[1])))})"

    return _LINK.sub(absolute, text)


def readme(text: str, release: Release) -> str:
    """Return the README as package indexes show it: it installs the release, and its links work on other pages."""
    text = _replace(text, "**Alpha: no version is released.**", f"**Alpha: version {release.version}.**")
    text = _replace(text, "pip install '.[trainer,cli]'", "pip install 'heterotrain[trainer,cli]'")
    text = _replace(
        text,
        "helm install heterotrain helm/heterotrain -n heterotrain-system --create-namespace \\\n"
        "  --set image.repository=REGISTRY/heterotrain-operator --set",
        f"helm install heterotrain {release.chart} --version {release.version} -n heterotrain-system \\\n"
        "  --create-namespace --set",
    )
    return links(text, "", release)


def manifest(text: str, release: Release) -> str:
    """Return the manifest for clusters without Helm with the released image, so that it can be applied as it is."""
    text = _replace(text, f"image: {SOURCE_IMAGE}:", f"image: {release.image}:")
    objects = text[text.index("apiVersion:") :]  # without the comment, which describes the manifest of the sources
    return (
        f"# heterotrain {release.version}: the objects of the chart with default values.\n"
        f"# kubectl apply --server-side -f {release.file('heterotrain.yaml')}\n{objects}"
    )


def project(text: str, release: Release) -> str:
    """Return ``pyproject.toml`` with the addresses that package indexes show."""
    urls = [
        "[project.urls]",
        f'Homepage = "{release.source}"',
        f'Documentation = "{release.page("README.md")}"',
        f'Changelog = "{release.page("CHANGELOG.md")}"',
        f'Issues = "{release.source}/issues"',
    ]
    return _replace(text, "\n[project.scripts]\n", "\n" + "\n".join(urls) + "\n\n[project.scripts]\n")


def check(root: Path, release: Release) -> None:
    """Compare the version of the release with those of the sources.

    Raises:
        ReleaseError: one of them differs.
    """
    found = _VERSION.search((root / VERSION_FILE).read_text(encoding="utf-8"))
    about = yaml.safe_load((root / "helm/heterotrain/Chart.yaml").read_text(encoding="utf-8"))
    for where, version in (
        (VERSION_FILE, found[1] if found else ""),
        ("version of helm/heterotrain/Chart.yaml", about["version"]),
        ("appVersion of helm/heterotrain/Chart.yaml", about["appVersion"]),
    ):
        if version != release.version:
            raise ReleaseError(
                f"the release has version {release.version}, but {where} has {version}: change one of them"
            )
    if "urls" in tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]:
        raise ReleaseError("the sources have the names of a release already: start from a new checkout")


def rename(root: Path, release: Release) -> None:
    """Rewrite the sources in place.

    Raises:
        ReleaseError: the versions differ, or a file does not have the expected text.
    """
    check(root, release)
    written = {
        path: change((root / path).read_text(encoding="utf-8"), release)
        for path, change in (
            ("helm/heterotrain/values.yaml", values),
            ("helm/heterotrain/Chart.yaml", chart),
            ("helm/heterotrain/README.md", chart_readme),
            ("deploy/manifest/heterotrain.yaml", manifest),
            ("pyproject.toml", project),
            ("README.md", readme),
        )
    }
    for path, text in written.items():
        (root / path).write_text(text, encoding="utf-8")


def write_files(root: Path, release: Release, out: Path) -> None:
    """Write the manifest and the files of the krew plugin from renamed sources."""
    (out / "heterotrain.yaml").write_bytes((root / "deploy/manifest/heterotrain.yaml").read_bytes())
    plugin = release.file("kubectl-htj.tar.gz")
    subprocess.run([root / "deploy/krew/build.sh", release.version, plugin, release.source, out], check=True)


def main() -> int:
    """Rewrite a checkout, and write the manifest and the files of the krew plugin; return the exit code."""
    parser = argparse.ArgumentParser(prog="lab.release_names", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout, which is rewritten in place")
    parser.add_argument("--version", required=True, help="such as 0.1.0")
    parser.add_argument("--registry", required=True, help="registry and owner, such as ghcr.io/owner")
    parser.add_argument("--source", required=True, help="address of the repository's page")
    parser.add_argument("--out", type=Path, required=True, help="folder for heterotrain.yaml and the krew plugin")
    given = parser.parse_args()
    release = Release(version=given.version, registry=given.registry, source=given.source.rstrip("/"))
    root: Path = given.root
    try:
        rename(root, release)
    except ReleaseError as error:
        print(f"release_names: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    write_files(root, release, given.out)
    return 0


def _replace(text: str, old: str, new: str) -> str:
    """Replace the only occurrence of ``old``.

    Raises:
        ReleaseError: there is none, or more than one.
    """
    if (found := text.count(old)) != 1:
        raise ReleaseError(f"{old.strip()!r} occurs {found} times instead of once: adapt lab.release_names")
    return text.replace(old, new)


if __name__ == "__main__":
    sys.exit(main())
