"""The image that is assembled from the environment has the files of the one that its Dockerfile builds."""

from __future__ import annotations

import json
import os
import re
import tarfile
from pathlib import Path

import pytest
from local_cluster import assembly, images, oci

pytestmark = [
    pytest.mark.integration,
    pytest.mark.thorough,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="images without Docker need root"),
]

INSTALLER = re.compile(
    r"heterotrain-[^/]*\.dist-info/(INSTALLER|REQUESTED|direct_url\.json|uv_cache\.json|RECORD)$|bin/activate|bin/Activate"
    r"|/\.lock$|bin/jsonpointer$|pyvenv\.cfg$|/uv_build\.json$"
)
"""Notes of installers, scripts for shells, and a program that no entry point announces."""


def files(manifest: str) -> dict[str, tuple[int, int | str]]:
    """Return the files below the image's environment, each with its rights and its size or target."""
    found: dict[str, tuple[int, int | str]] = {}
    for digest in oci.blobs_of(manifest)[2:]:
        with tarfile.open(oci.blob(digest)) as tar:
            for entry in tar:
                name = entry.name.removeprefix("./")
                if name.startswith(f"{assembly.ROOT}/") and not entry.isdir() and not INSTALLER.search(name):
                    # Scripts differ in their texts, and bytecode in which of its objects are written once.
                    differs = entry.isreg() and ("/bin/" in name or name.endswith(".pyc"))
                    content = entry.linkname if entry.issym() else entry.size
                    found[name] = (entry.mode & 0o777, 0 if differs else content)
    return found


def test_both_ways_give_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEROTRAIN_CACHE", str(tmp_path))
    (operator,) = (each for each in images.own() if each.name.startswith("operator"))
    built, settings = {}, {}
    for way in (images.Way.ENVIRONMENT, images.Way.DOCKERFILE):
        monkeypatch.setenv("IMAGES", way)
        manifest = images.build(operator)
        built[way] = files(manifest)
        config = json.loads(oci.blob(oci.blobs_of(manifest)[1]).read_text())
        settings[way] = {name: value for name, value in config["config"].items() if name != "Labels"}
    assembled, by_dockerfile = built.values()
    assert len(assembled) > 5000
    assert {*assembled} == {*by_dockerfile}
    assert [name for name in assembled if assembled[name] != by_dockerfile[name]] == []
    assert settings[images.Way.ENVIRONMENT] == settings[images.Way.DOCKERFILE]
