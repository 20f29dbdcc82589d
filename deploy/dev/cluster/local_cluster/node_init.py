"""The first process of a node, run as a program: it builds the node's file system and keeps the services running.

It reads its instructions as one JSON document from standard input, once its network exists. If the launcher ends before
that, standard input ends too, and so does the node. A kill of this process ends all other processes of the node.
Only the standard library is used: the interpreter runs isolated from any environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

RESTART_DELAY_S = 0.3
NICENESS = -10
"""Of the services: pods and other programs that keep every processor busy must not make a node look lost."""


def main() -> None:
    """Set the node up and keep its services running until its power is cut."""
    text = sys.stdin.read()
    if not text:
        sys.exit("the launcher ended before the node was ready")
    instructions = json.loads(text)
    socket.sethostname(instructions["name"])
    build_view(instructions)
    supervise(instructions["services"], Path("/var/log"), instructions["path"])


def build_view(instructions: dict[str, Any]) -> None:
    """Mount the node's own folders and files over the machine's; the mount namespace keeps them private."""
    folder = Path(instructions["folder"])
    cache = Path(instructions["cache"])
    var = folder / "var"
    for entry in instructions["mounts"]:
        target = var / Path(entry["node_path"]).relative_to("/var")
        target.mkdir(parents=True, exist_ok=True)
        mount("--rbind", entry["host_path"], target)
        if entry["is_read_only"]:
            mount("-o", "remount,bind,ro", target)
    if cache.is_relative_to("/var"):  # otherwise the mount over /var would hide the node's programs
        inside = var / cache.relative_to("/var")
        inside.mkdir(parents=True, exist_ok=True)
        mount("--rbind", cache, inside)
    for name in ("lib/kubelet", "lib/containerd", "log", "tmp"):
        (var / name).mkdir(parents=True, exist_ok=True)
    (var / "tmp").chmod(0o1777)
    mount("--rbind", var, "/var")
    # As on a real machine, the contents of /run (sockets, leases of pod addresses) vanish with the power.
    mount("-t", "tmpfs", "-o", "mode=755", "node-run", "/run")
    for path, content in instructions["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
        if content.startswith("#!"):
            Path(path).chmod(0o755)
    for name, value in instructions["private_sysctls"].items():
        cover(Path("/proc/sys") / name, value)
    machine_id = folder / "machine-id"
    if not machine_id.exists():
        machine_id.write_text(os.urandom(16).hex() + "\n")
    cover(Path("/etc/machine-id"), machine_id.read_text())
    for name, value in instructions["sysctls"].items():
        (Path("/proc/sys") / name).write_text(value)
    # The node's programs must see the pods' volumes, and the pods must see the node's.
    mount("--make-rshared", "/")


def cover(path: Path, content: str) -> None:
    """Mount a private file with ``content`` over ``path``: the node reads and writes it, not the machine's file."""
    if not path.exists():
        return
    own = Path("/run/heterotrain/covers") / path.relative_to("/")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(content)
    mount("--bind", own, path)


def mount(*arguments: str | Path) -> None:
    """Run ``mount`` with these arguments."""
    subprocess.run(["mount", *map(str, arguments)], check=True, stdin=subprocess.DEVNULL)


def supervise(services: dict[str, list[str]], logs: Path, path: str) -> None:
    """Start each service, restart it soon after it ends, and reap orphaned processes."""
    running: dict[int, str] = {}
    due_s = dict.fromkeys(services, 0.0)
    environment = {"PATH": path, "HOME": "/root", "TMPDIR": "/var/tmp"}  # noqa: S108  # the node's own folder
    while True:
        for name in [name for name, at_s in due_s.items() if at_s <= time.monotonic()]:
            del due_s[name]
            with (logs / f"{name}.log").open("ab") as log:
                # Pods would inherit containerd's own niceness.
                command = services[name] if name == "containerd" else ["nice", "-n", str(NICENESS), *services[name]]
                running[start(command, log.fileno(), environment)] = name
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG if due_s else 0)
        except ChildProcessError:  # every service has ended and none is due yet
            pid = 0
        if pid == 0:
            time.sleep(0.05)
        if pid in running:
            due_s[running.pop(pid)] = time.monotonic() + RESTART_DELAY_S


def start(command: list[str], log: int, environment: dict[str, str]) -> int:
    """Start a program in a session of its own and return its process number.

    Where the kernel shares processors between sessions, the niceness of the session counts, too.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    pid = os.posix_spawnp(command[0], command, environment, file_actions=actions, setsid=True)
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
    return pid


if __name__ == "__main__":
    main()
