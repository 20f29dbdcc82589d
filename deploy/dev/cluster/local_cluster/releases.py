"""Programs of upstream releases: which files hold them, with their pinned SHA-256, and how they are unpacked."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tarfile
import tomllib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from local_cluster import paths
from local_cluster.download import LARGEST_FILE_BYTES, Downloads
from local_cluster.process import Problem

MANIFEST = paths.LOCAL / "releases.toml"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file on a host of releases.

    Attributes:
        members: path in the archive of each program, by the program's name; empty if the file itself is a program.
    """

    url: str
    sha256: str
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The programs that it holds."""
        return tuple(self.members) or (self.url.rpartition("/")[2],)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Files that together take the place of compiled programs.

    Attributes:
        replaces: names of these programs, as the toolchain knows them.
    """

    name: str
    replaces: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All programs that it holds."""
        return tuple(name for file in self.files for name in file.names)

    @property
    def mark(self) -> str:
        """A text that changes with the files."""
        content = [(file.sha256, sorted(file.members.items())) for file in self.files]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read(text: str, machine: str) -> tuple[Release, ...]:
    """Return the releases for a machine such as ``x86_64``; one that lacks a file for it is left out.

    Raises:
        Problem: the text is no manifest.
    """
    architecture = ARCHITECTURES.get(machine, "")
    try:
        found = []
        for name, entry in tomllib.loads(text).items():
            if not all(architecture in each["sha256"] for each in entry["files"]):
                continue
            files = tuple(_file(each, architecture) for each in entry["files"])
            found.append(Release(name=name, replaces=tuple(entry["replaces"]), files=files))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Problem(f"{MANIFEST.name} is damaged: {type(error).__name__}: {error}") from error
    return tuple(found)


def known() -> tuple[Release, ...]:
    """Return the pinned releases for this machine, or those of another manifest, such as one of a mirror.

    Raises:
        Problem: ``HETEROTRAIN_RELEASES`` names no manifest.
    """
    path = Path(os.environ.get("HETEROTRAIN_RELEASES") or MANIFEST)
    try:
        return read(path.read_text(), platform.machine())
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path} cannot be read as a list of releases: {error}") from error


def install(release: Release, folder: Path, downloads: Downloads) -> None:
    """Download the release's programs into a folder; none of them is there if one cannot be had.

    Raises:
        Problem: a file could not be downloaded, is another one, or lacks a program.
    """
    draft = folder / "download"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        programs = draft / "programs"
        programs.mkdir()
        for file in release.files:
            archive = draft / "archive"
            downloads.fetch(file.url, file.sha256, archive if file.members else programs / file.names[0])
            if file.members:
                unpack(archive, file.members, programs)
        for name in release.names:
            (programs / name).chmod(0o755)
            # A running program's file cannot be overwritten, but it can be replaced.
            (programs / name).replace(folder / name)
    finally:
        shutil.rmtree(draft)


def unpack(archive: Path, members: Mapping[str, str], folder: Path) -> None:
    """Write members of a tar archive, each a plain file, into a folder under the names of their programs.

    Nothing else of the archive is used: no other member, and of these neither path nor links, owners or modes.

    Raises:
        Problem: it is no archive, or a member is missing or no plain file.
    """
    wanted = {path: name for name, path in members.items()}
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:
                path = entry.name.removeprefix("./")
                if path not in wanted or not entry.isreg() or entry.size > LARGEST_FILE_BYTES:
                    continue
                source = tar.extractfile(entry)
                assert source is not None  # noqa: S101  # a plain file
                with source, (folder / wanted.pop(path)).open("wb") as target:
                    shutil.copyfileobj(source, target)
                if not wanted:
                    return
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise Problem(f"{archive.name} cannot be unpacked: {error}") from error
    raise Problem(f"the archive lacks {_listed(wanted)}")


def _file(entry: Mapping[str, Mapping[str, str]], architecture: str) -> File:
    url = str(entry["url"]).format(architecture=architecture)
    members = {name: path.format(architecture=architecture) for name, path in entry.get("members", {}).items()}
    sha256 = entry["sha256"][architecture]
    if not url.startswith(("https://", "http://127.0.0.1:")) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"{url} needs https and a SHA-256")
    file = File(url=url, sha256=sha256, members=members)
    if bad := [name for name in file.names if not NAME.fullmatch(name)]:
        raise ValueError(f"{_listed(bad)} cannot be the name of a program")
    return file


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
