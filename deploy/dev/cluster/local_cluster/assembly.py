"""Images from what is there already: Debian packages, the Python environment of this process, and the project's wheel.

The result has the files and settings that the Dockerfiles give, without a second installation of PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import py_compile
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from local_cluster import oci, paths
from local_cluster.process import Problem, run

if TYPE_CHECKING:
    from local_cluster.images import Image

BASE_PYTHON = (3, 11)
"""The Python of the base image; bytecode and compiled modules of another one do not fit."""
ROOT = "opt/heterotrain"
SITE = f"{ROOT}/lib/python{BASE_PYTHON[0]}.{BASE_PYTHON[1]}/site-packages"
ONLY_WITH_CUDA = re.compile(r"triton$|nvidia-[^m]|cuda-")
"""nvidia-ml-py is Python alone."""
SOURCES = ("core", "planner", "operator", "trainer", "cli", "deploy/examples/digits")
WHEEL_INPUTS = tuple(paths.REPOSITORY / name for name in ("pyproject.toml", "README.md", "LICENSE", *SOURCES))
"""What .dockerignore leaves for the Dockerfiles, and more."""
BATCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a Dockerfile's last stage says about the running of its image, and the files that it copies."""

    config: dict[str, Any] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    is_empty: bool = False


def settings(dockerfile: str) -> Settings:
    """Read the last stage of a Dockerfile.

    Raises:
        Problem: it has an instruction that this module does not know.
    """
    instructions = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", dockerfile)).splitlines()
    stages = [number for number, line in enumerate(instructions) if line.startswith("FROM ")]
    config: dict[str, Any] = {}
    copies = []
    for line in filter(str.strip, instructions[stages[-1] + 1 :]):
        instruction, _, rest = line.partition(" ")
        match instruction:
            case "ENV":
                config["Env"] = [*config.get("Env", []), *rest.split()]
            case "USER":
                config["User"] = rest.strip()
            case "CMD" | "ENTRYPOINT":
                config[instruction.capitalize()] = json.loads(rest)
            case "COPY":
                *_, source, target = rest.split()
                copies.append((source, target))
            case "ARG" | "RUN":
                pass
            case _:
                raise Problem(f"a Dockerfile's {instruction} is not known to the cluster's images")
    return Settings(config=config, copies=tuple(copies), is_empty=instructions[stages[-1]].split()[1] == "scratch")


def serves(image: Image) -> bool:
    """Return whether this process's environment has what the image needs."""
    if image.lock is None:
        return True
    try:
        return sys.version_info[:2] == BASE_PYTHON and all(map(_has_its_files, _distributions(image)))
    except importlib.metadata.PackageNotFoundError:
        return False


def build(image: Image, base: Callable[[], oci.Blob]) -> str:
    """Assemble an image and return its manifest's digest."""
    read = settings(image.dockerfile.read_text())
    if read.is_empty:
        layers = [oci.write_layer(lambda tar: _add_copies(tar, image.context, read.copies))]
    else:
        # The base is unpacked and configured by one process, and packages are packed meanwhile.
        with ThreadPoolExecutor(1) as background:
            below = background.submit(base)
            above = [_packages(image), _wheel(image.without)]
            layers = [below.result(), *above]
    return oci.write_manifest(layers, read.config)


def _add_copies(tar: tarfile.TarFile, context: Path, copies: Iterable[tuple[str, str]]) -> None:
    for source, target in copies:
        _add_file(tar, (context / source).resolve(), target.lstrip("/"))


def _distributions(image: Image) -> list[importlib.metadata.Distribution]:
    """Return the installed packages of the image's lock, without those that it leaves out.

    Raises:
        PackageNotFoundError: one is missing, or has another version.
    """
    assert image.lock is not None  # noqa: S101  # asked before
    leave_out = re.compile(f"^({image.arguments.get('LEAVE_OUT') or 'nothing=='})")
    entries = re.findall(r"(?m)^[a-z0-9][^\\\n]*", image.lock.read_text())
    wanted = [Requirement(entry) for entry in entries if not leave_out.match(entry)]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate()]
    own_torch = "+" in importlib.metadata.version("torch") if any(each.name == "torch" for each in wanted) else False
    found = []
    for each in wanted:
        if own_torch and ONLY_WITH_CUDA.match(each.name):
            continue  # PyTorch from an index of its own, which needs none of them
        distribution = importlib.metadata.distribution(each.name)
        if not each.specifier.contains(distribution.version.partition("+")[0]):
            raise importlib.metadata.PackageNotFoundError(each.name)
        found.append(distribution)
    return found


def _has_its_files(distribution: importlib.metadata.Distribution) -> bool:
    return bool(distribution.files) and all(source.is_file() for _, source in _files(distribution))


def _files(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Yield each file of a package below the folder of packages: its name there, and its path."""
    for each in distribution.files or ():
        if ".." not in each.parts and "__pycache__" not in each.parts:
            yield str(each), Path(str(distribution.locate_file(each)))


def _packages(image: Image) -> oci.Blob:
    """Return the layer of the lock's packages, which is kept for as long as they are the same."""
    distributions = sorted(_distributions(image), key=lambda each: each.metadata["Name"].lower())
    versions = [f"{each.metadata['Name']} {each.version}" for each in distributions]
    return oci.kept(f"packages-{paths.digest((), sys.version, *versions)}", lambda: packed(distributions))


def packed(distributions: Sequence[importlib.metadata.Distribution]) -> oci.Blob:
    """Return a layer of installed packages, with their bytecode and commands, as the image's Python environment."""
    with tempfile.TemporaryDirectory(prefix="heterotrain-bytecode-") as folder:
        sources = [
            (source, f"/{SITE}/{name}")
            for each in distributions
            for name, source in _files(each)
            if name.endswith(".py")
        ]
        bytecode = _compile(sources, Path(folder))

        def fill(tar: tarfile.TarFile) -> None:
            _add_environment(tar)
            for each in distributions:
                for name, source in _files(each):
                    _add_file(tar, source, f"{SITE}/{name}")
                    if compiled := bytecode.get(f"/{SITE}/{name}"):
                        _add_file(tar, compiled, _cached(f"{SITE}/{name}"))
                _add_scripts(tar, each.entry_points)

        return oci.write_layer(fill)


def _add_environment(tar: tarfile.TarFile) -> None:
    """Add what makes the folder a virtual environment of the base's Python."""
    version = ".".join(map(str, BASE_PYTHON))
    oci.add_text(
        tar, f"{ROOT}/pyvenv.cfg", f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n"
    )
    for name, target in {
        "bin/python": "python3",
        "bin/python3": "/usr/bin/python3",
        f"bin/python{version}": "python3",
        "lib64": "lib",
    }.items():
        entry = tarfile.TarInfo(f"{ROOT}/{name}")
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
        tar.addfile(entry)


def _add_file(tar: tarfile.TarFile, source: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    with source.open("rb") as file:
        status = os.fstat(file.fileno())
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
        tar.addfile(entry, file)


def _add_scripts(tar: tarfile.TarFile, entry_points: Iterable[importlib.metadata.EntryPoint]) -> None:
    for each in entry_points:
        if each.group == "console_scripts":
            start = each.attr.partition(".")[0]
            text = (
                f"#!/{ROOT}/bin/python\nimport sys\n\nfrom {each.module} import {start}\n\n"
                f'if __name__ == "__main__":\n    sys.exit({each.attr}())\n'
            )
            oci.add_text(tar, f"{ROOT}/bin/{each.name}", text, mode=0o755)


def _wheel(without: Sequence[str]) -> oci.Blob:
    """Return the layer of the project's wheel without these of its packages."""
    name = f"wheel-{paths.digest(WHEEL_INPUTS, sys.version, *without)}"

    def make() -> oci.Blob:
        with tempfile.TemporaryDirectory(prefix="heterotrain-wheel-") as folder:
            run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=paths.REPOSITORY)
            (wheel,) = Path(folder).glob("*.whl")
            return installed(wheel, without)

    return oci.kept(name, make)


def installed(wheel: Path, without: Sequence[str]) -> oci.Blob:
    """Return a layer of the project's wheel as an installer leaves it, except for these packages and their commands."""
    return oci.write_layer(lambda tar: _add_wheel(tar, wheel, without))


def _add_wheel(tar: tarfile.TarFile, wheel: Path, without: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="heterotrain-wheel-") as folder:
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)  # noqa: S202  # it was built a moment ago
        names = sorted(str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file())
        names = [name for name in names if name.partition("/")[0] not in without]
        sources = [(unpacked / name, f"/{SITE}/{name}") for name in names if name.endswith(".py")]
        bytecode = _compile(sources, Path(folder))
        for name in names:
            _add_file(tar, unpacked / name, f"{SITE}/{name}")
            if compiled := bytecode.get(f"/{SITE}/{name}"):
                _add_file(tar, compiled, _cached(f"{SITE}/{name}"))
        (metadata,) = unpacked.glob("*.dist-info")
        commands = importlib.metadata.PathDistribution(metadata).entry_points
        _add_scripts(tar, [each for each in commands if each.module.partition(".")[0] not in without])


def _cached(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc")


def _compile(sources: Sequence[tuple[Path, str]], folder: Path) -> dict[str, Path]:
    """Compile modules for good: the bytecode is never compared with a source. Return its files by name in the image."""
    planned = [(str(source), name, str(folder / f"{number}.pyc")) for number, (source, name) in enumerate(sources)]
    batches = [planned[start : start + BATCH] for start in range(0, len(planned), BATCH)]
    # Started anew: another thread compiles programs meanwhile, and a copy of this process could inherit a held lock.
    context = multiprocessing.get_context("spawn")
    cores = min(len(os.sched_getaffinity(0)), len(batches)) or 1
    with ProcessPoolExecutor(cores, mp_context=context, initializer=os.nice, initargs=(10,)) as pool:
        return {name: Path(target) for batch in pool.map(_compile_batch, batches) for name, target in batch}


def _compile_batch(planned: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    done = []
    for source, name, target in planned:
        try:
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(source, target, name, doraise=True, invalidation_mode=mode, quiet=1)
        except (py_compile.PyCompileError, SyntaxError, ValueError):
            continue  # some packages carry templates, and tests of bad syntax
        done.append((name, target))
    return done
