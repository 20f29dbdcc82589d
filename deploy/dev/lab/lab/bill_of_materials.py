"""Bills of materials of a release in CycloneDX 1.6, from locked requirements and the packages of an image's base.

A bill is the same for the same inputs: it has no time and no random number.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any, Final

from packaging.requirements import Requirement

MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Python's names of the machines that images are made for."""


def bill(name: str, version: str, *, lock: str, architecture: str = "", dpkg_status: str = "") -> dict[str, Any]:
    """Return the bill of a wheel, or of an image for one architecture such as ``arm64``.

    Args:
        name: of what the bill describes.
        version: of the release.
        lock: locked requirements with hashes, as ``make lock`` writes them. A requirement whose marker does not hold on
            the architecture is left out; a bill without an architecture has all of them.
        architecture: empty for what runs anywhere.
        dpkg_status: the base's list of Debian packages.
    """
    parts = [*_python(lock, architecture), *_debian(dpkg_status)]
    about = {"type": "container" if architecture else "library", "bom-ref": name, "name": name, "version": version}
    content = "\n".join([name, version, *(part["purl"] for part in parts)])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": about},
        "components": parts,
    }


def _python(lock: str, architecture: str) -> Iterator[dict[str, Any]]:
    machine = {"platform_machine": MACHINES[architecture], "sys_platform": "linux"} if architecture else {}
    for entry in re.split(r"\n(?=[a-zA-Z0-9])", lock.replace("\\\n", " ")):
        line, *hashes = entry.split(" --hash=sha256:")
        if not (line := line.partition("#")[0].strip()):
            continue
        wanted = Requirement(line.strip())
        if machine and wanted.marker and not wanted.marker.evaluate(machine):
            continue
        part = _part(f"pkg:pypi/{wanted.name.lower()}", wanted.name, next(iter(wanted.specifier)).version)
        accepted = [{"alg": "SHA-256", "content": each.strip()} for each in hashes]
        yield part | {"externalReferences": [{"type": "distribution", "url": part["purl"], "hashes": accepted}]}


def _debian(status: str) -> Iterator[dict[str, Any]]:
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"(?m)^([A-Za-z-]+): (.*)$", paragraph))
        if "Package" in fields and not fields["Status"].startswith("deinstall"):
            where = f"?arch={fields['Architecture']}&distro=bookworm"
            yield _part(f"pkg:deb/debian/{fields['Package']}", fields["Package"], fields["Version"], where)


def _part(purl: str, name: str, version: str, qualifiers: str = "") -> dict[str, Any]:
    purl = f"{purl}@{version.replace('+', '%2B')}{qualifiers}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
