"""Images inside containerd: a template of a node's storage, filled once, and the same loading into nodes that run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from local_cluster import images, places
from local_cluster.process import Problem, step, wait_until

CONTENT = "io.containerd.content.v1.content/blobs/sha256"


def root() -> Path:
    """Return the folder of the template, a containerd root as each node has one."""
    return places.cache() / "template/root"


def fill(wanted: Sequence[images.Image]) -> None:
    """Let the template hold every image in its present state."""
    mark = root().parent / "images.json"
    loaded: dict[str, str] = json.loads(mark.read_text()) if mark.exists() else {}
    missing = [image for image in wanted if loaded.get(image.reference) != images.build(image)]
    if not missing:
        return
    root().mkdir(parents=True, exist_ok=True)
    with step(f"importing {', '.join(image.name for image in missing)}"), _Containerd() as containerd:
        for image in missing:
            load(image, root(), containerd.prefix)
            loaded[image.reference] = images.build(image)
            mark.write_text(json.dumps(loaded))
    _share_blobs()


def load(image: images.Image, storage: Path, prefix: Sequence[str | Path]) -> None:
    """Import an image into a containerd; layers that it has are not sent.

    Args:
        storage: the containerd's root, as seen from here.
        prefix: command that ctr's arguments are added to.
    """
    known = {f"sha256:{path.name}" for path in (storage / CONTENT).glob("*")}
    write = images.archive(image, without=known)
    command = [str(word) for word in prefix] + ["images", "import", "--local", "--digests=false", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None  # noqa: S101, PT018  # both are pipes
        try:
            write(process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended: its own words follow
        said = process.stderr.read().decode()
    if process.returncode != 0:
        raise Problem(f"containerd refused heterotrain/{image.name}: {said.strip()[-800:]}")


class _Containerd:
    """A containerd on the template, in namespaces of its own: it leaves no mount and dies with us."""

    def __init__(self) -> None:
        self._state = places.cache() / "template/state"
        self._socket = self._state / "containerd.sock"
        self.prefix = [places.programs() / "ctr", "--address", self._socket, "--namespace", "k8s.io"]

    def __enter__(self) -> _Containerd:
        self._state.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        config = self._state / "config.toml"
        config.write_text(f"""
version = 3
root = "{root()}"
state = "{self._state}"
temp = "{self._state}/temp"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri"]
[grpc]
  address = "{self._socket}"
""")
        with (self._state / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                    str(places.programs() / "containerd"), "--config", str(config),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait_until(lambda: self._socket.exists() or self._process.poll() is not None, "containerd", timeout_s=60, every_s=0.02)
            if self._process.poll() is not None:
                raise Problem(f"containerd ended at once: see {self._state}/log")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # the databases are transactional, and what is not written down is collected at the next start
        self._process.wait()


def _share_blobs() -> None:
    """Let the layout and the template keep one copy of what both hold."""
    for blob in (root() / CONTENT).glob("*"):
        twin = images.layout() / "oci/blobs/sha256" / blob.name
        if twin.exists() and not twin.samefile(blob):
            draft = twin.with_suffix(".link")
            draft.unlink(missing_ok=True)
            draft.hardlink_to(blob)
            draft.replace(twin)
