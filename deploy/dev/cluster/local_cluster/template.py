"""Images inside containerd: a template of a node's storage, filled once, and the loading into running nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from local_cluster import images, oci, paths
from local_cluster.process import Problem, step, wait_until

CONTENT = "io.containerd.content.v1.content/blobs/sha256"


def root() -> Path:
    """Return the folder of the template: a containerd root like that of each node."""
    return paths.cache() / "template/root"


def fill(wanted: Sequence[images.Image]) -> None:
    """Import the current version of every image into the template."""
    mark = root().parent / "images.json"
    loaded: dict[str, str] = json.loads(mark.read_text()) if mark.exists() else {}
    manifests = {image.reference: images.build(image) for image in wanted}
    missing = [image for image in wanted if loaded.get(image.reference) != manifests[image.reference]]
    if not missing:
        return
    root().mkdir(parents=True, exist_ok=True)
    with step(f"importing {', '.join(image.name for image in missing)}"), _containerd() as ctr:
        for image in missing:
            load(image, root(), ctr)
            loaded[image.reference] = manifests[image.reference]
            mark.write_text(json.dumps(loaded))
    _share_blobs()


def load(image: images.Image, storage: Path, ctr: Sequence[str | Path]) -> None:
    """Import an image into a containerd, without the layers that it already has.

    Args:
        image: an image that has been built.
        storage: the containerd's root, as seen from this process.
        ctr: the ctr command line, without arguments.
    """
    known = {f"sha256:{path.name}" for path in (storage / CONTENT).glob("*")}
    write = oci.archive(image.name, image.reference, without=known)
    start = [str(word) for word in ctr]
    # An import names the new image before it unpacks it. Without a second name the old image would be collected
    # meanwhile, with the layers that both share. The first import has no old image.
    tag = [*start, "images", "tag", "--force", image.reference, f"{image.reference}-before"]
    subprocess.run(tag, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    command = [*start, "images", "import", "--local", "--digests=false", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None  # noqa: S101, PT018  # both are pipes
        try:
            write(process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended: its error message follows
        message = process.stderr.read().decode()
    if process.returncode != 0:
        raise Problem(f"containerd refused heterotrain/{image.name}: {message.strip()[-800:]}")


@contextmanager
def _containerd() -> Iterator[list[str | Path]]:
    """Run a containerd on the template and yield its ctr.

    Its own namespaces make sure that it leaves no mount behind and ends with this process.
    """
    state = paths.cache() / "template/state"
    state.mkdir(parents=True, exist_ok=True)
    config, socket, log = state / "config.toml", state / "containerd.sock", state / "log"
    socket.unlink(missing_ok=True)
    config.write_text(f"""
version = 3
root = "{root()}"
state = "{state}"
temp = "{state}/temp"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
  "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{socket}"
""")
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*isolated, str(paths.programs() / "containerd"), "--config", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_until(lambda: socket.exists() or process.poll() is not None, "containerd", timeout_s=60, every_s=0.02)
        if process.poll() is not None:
            raise Problem(f"containerd ended at once: {log.read_text()[-500:]}")
        yield [paths.programs() / "ctr", "--address", socket, "--namespace", "k8s.io"]
    finally:
        process.kill()  # its databases are transactional; the next start collects everything that is not in them
        process.wait()


def _share_blobs() -> None:
    """Hard-link the layout's blobs to the template's, so that the disk holds one copy."""
    for blob in (root() / CONTENT).glob("*"):
        twin = oci.layout() / "oci/blobs/sha256" / blob.name
        if twin.exists() and not twin.samefile(blob):
            draft = twin.with_suffix(".link")
            draft.unlink(missing_ok=True)
            draft.hardlink_to(blob)
            draft.replace(twin)
