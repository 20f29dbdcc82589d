"""A release as its users meet it: pushed into a registry on loopback, then installed by the released README's commands.

The README is that of the wheel. Its commands run as they stand; where one cannot run here, the result says so.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import yaml
from local_cluster import paths
from local_cluster.process import Problem, run, step, wait_until

from lab import chart_files
from lab.bill_of_materials import MACHINES
from lab.release_names import Release

_KUBERNETES: Final = ("--kube-version", "1.36.0")


@contextmanager
def registry(release: Release, out: Path) -> Iterator[None]:
    """Serve the release's registry from ``out/registry`` until the block ends.

    Raises:
        Problem: its address is not on loopback, or is taken.
    """
    host, _, port = release.registry.partition("/")[0].partition(":")
    if host not in ("localhost", "127.0.0.1") or not port.isdecimal():
        raise Problem(
            f"a rehearsal pushes to loopback only, such as localhost:5000/heterotrain, not {release.registry}"
        )
    (out / "registry").mkdir()
    command = [_crane(), "registry", "serve", "--address", f"127.0.0.1:{port}", "--disk", str(out / "registry")]
    with (out / "registry.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_until(lambda: _answers(server, port), f"the registry on port {port}", timeout_s=20)
            yield
        finally:
            server.terminate()


def push_images(release: Release, out: Path) -> None:
    """Push each image as an index of its architectures."""
    for layout in sorted((out / "images").glob("*")):
        name = f"{release.registry.lower()}/heterotrain-{layout.name}:{release.version}"
        with step(f"push {name}"):
            run(_crane(), "push", layout, name, "--index", timeout_s=1800)


def push_chart(release: Release, out: Path) -> None:
    """Push the chart."""
    (chart,) = out.glob("heterotrain-*.tgz")
    run(chart_files.helm(), "push", chart, release.chart.rpartition("/")[0], "--plain-http")


def rehearse(release: Release, out: Path) -> list[str]:
    """Run the commands of the released README and the plugin; return what could not be tried, each in a sentence.

    ``out/transcript.txt`` gets what they print.

    Raises:
        Problem: a command fails, or something that is named is not there.
    """
    left_out: list[str] = []
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        found = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", archive.read(about).decode())
    blocks = [text for language, text in found if not language]
    with TemporaryDirectory(prefix="heterotrain-rehearsal-") as folder:
        here = _Newcomer(Path(folder), out)
        for line in blocks[0].replace("\\\n", " ").splitlines():
            if " --index-url " in line and not _can_be_reached(line.split()[-1]):
                left_out.append(f"`{line}`: its host does not answer, so PyTorch comes from the index of pip")
                continue
            with step(line):
                here.run(line)
        has_images = (out / "images/operator").exists()
        _cluster(release, blocks[1].replace("\\\n", " ").splitlines(), here, left_out, has_images=has_images)
        _plugin(out, here)
        if has_images:
            _run_operator(release, out, Path(folder), left_out)
    return left_out


class _Newcomer:
    """An empty folder and an environment whose pip and uv know the folder of the release besides their index."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._here = folder / "here"
        self._here.mkdir()
        self._transcript = out / "transcript.txt"
        uv = Path(sys.executable).parent / "uv"
        run(uv, "venv", "--quiet", "--python", sys.executable, folder / "environment")
        programs = folder / "environment/bin"
        # uv keeps wheels that it has fetched once; pip would fetch PyTorch again.
        (programs / "pip").write_text(f'#!/bin/sh\nexec "{uv}" pip "$@"\n')
        (programs / "uvx").write_text(f'#!/bin/sh\nexec "{uv}" tool run "$@"\n')
        for name in ("pip", "uvx"):
            (programs / name).chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:{Path(chart_files.helm()).parent}:/usr/local/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": str(folder / "environment"),
            "UV_FIND_LINKS": str(out.resolve()),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def run(self, line: str) -> str:
        """Run a command line and add it to the transcript with what it printed; return that."""
        printed = run("bash", "-euc", line, cwd=self._here, environment=self.environment, timeout_s=1800)
        with self._transcript.open("a", encoding="utf-8") as file:
            file.write(f"$ {line}\n{printed}\n")
        return printed


def _cluster(release: Release, lines: list[str], here: _Newcomer, left_out: list[str], *, has_images: bool) -> None:
    """Render the chart as the README installs it, find its images in the registry, and check the README's job."""
    install, init, submit = lines
    words = install.replace("helm install", "helm template", 1).replace("--create-namespace", "")
    with step("the README's chart and job, without a cluster"):
        objects = [
            each for each in yaml.safe_load_all(here.run(" ".join([words, "--plain-http", *_KUBERNETES]))) if each
        ]
        pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
        for image in {container["image"] for pod in pods for container in pod["containers"]}:
            if not image.startswith(f"{release.image}:{release.version}"):
                raise Problem(f"the chart pulls {image}, and not {release.image}:{release.version}")
            if has_images:
                _platforms(image)
        here.run(f"touch train.py; {init}")
        here.run("heterotrain validate job.yaml")
    left_out.append(f"`helm install` and `{submit}` need a cluster: the chart was rendered, and the job validated")


def _platforms(image: str) -> None:
    index = json.loads(run(_crane(), "manifest", image))
    for each in index["manifests"]:
        run(_crane(), "config", image, "--platform", f"linux/{each['platform']['architecture']}")


def _plugin(out: Path, here: _Newcomer) -> None:
    """Unpack the plugin that its manifest names, and run it where only uv is."""
    about = yaml.safe_load((out / "htj.yaml").read_text())["spec"]["platforms"][0]
    archive = out / about["uri"].rpartition("/")[2]
    with step("the plugin for kubectl, which installs the wheel"):
        here.run(f"echo '{about['sha256']}  {archive}' | sha256sum --check --quiet")
        here.run(f"mkdir -p plugin && tar -xzf '{archive}' -C plugin")
        here.run('mv "$VIRTUAL_ENV/bin/heterotrain" . ; plugin/kubectl-htj --help')


def _run_operator(release: Release, out: Path, folder: Path, left_out: list[str]) -> None:
    """Pull the operator's image for each architecture, and start its program in it; qemu runs foreign ones."""
    image = f"{release.image}:{release.version}"
    index = json.loads((out / "images/operator/index.json").read_text())
    for architecture in (each["platform"]["architecture"] for each in index["manifests"]):
        machine = MACHINES[architecture]
        emulator = shutil.which(f"qemu-{machine}-static")
        if os.geteuid() != 0 or (machine != platform.machine() and emulator is None):
            left_out.append(f"{image} for {architecture} was not started: that needs root, and qemu-user-static")
            continue
        with step(f"{image} for {architecture}, pulled and started"):
            root = folder / architecture
            root.mkdir()
            run(_crane(), "export", image, root / "files.tar", "--platform", f"linux/{architecture}")
            run("tar", "-x", "-C", root, "-f", root / "files.tar")
            start: list[str | Path] = ["chroot", root]
            if machine != platform.machine() and emulator is not None:
                shutil.copy(emulator, root / "emulator")
                start.append("/emulator")
            run(*start, "/opt/heterotrain/bin/python", "/opt/heterotrain/bin/heterotrain-operator", "--help")
            shutil.rmtree(root)


def _crane() -> str:
    return shutil.which("crane") or str(paths.programs() / "crane")


def _answers(server: subprocess.Popen[bytes], port: str) -> bool:
    if server.poll() is not None:
        raise Problem(f"no registry can be served on port {port}: is it taken? Choose another by ARGS=--registry")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5):
            return True
    except OSError:
        return False


def _can_be_reached(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10):  # noqa: S310  # https, from the README
            return True
    except OSError:
        return False
