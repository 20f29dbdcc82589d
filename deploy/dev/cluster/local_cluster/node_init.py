"""The first process of a node, run as a program: makes the node's view of the file system, then keeps its services running.

It gets its orders as one JSON document on standard input, once its network is there. If the launcher ends before that,
standard input ends too, and so does the node. When this process is killed the kernel takes all of the node with it.
Only the standard library is used: the interpreter runs isolated from any environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESTART_DELAY_S = 0.3


def main() -> None:
    """Set the node up and look after it until somebody cuts its power."""
    text = sys.stdin.read()
    if not text:
        sys.exit("the launcher has gone before the node was ready")
    orders = json.loads(text)
    socket.sethostname(orders["name"])
    build_view(orders)
    supervise(orders["services"], Path("/var/log"), orders["path"])


def build_view(orders: dict[str, Any]) -> None:
    """Give the node folders and files of its own in place of the machine's; its mount namespace keeps that private."""
    folder = Path(orders["folder"])
    cache = Path(orders["cache"])
    var = folder / "var"
    for entry in orders["mounts"]:
        target = var / Path(entry["node_path"]).relative_to("/var")
        target.mkdir(parents=True, exist_ok=True)
        mount("--rbind", entry["host_path"], target)
        if entry["is_read_only"]:
            mount("-o", "remount,bind,ro", target)
    if cache.is_relative_to("/var"):  # else the node would cover its own programs
        inside = var / cache.relative_to("/var")
        inside.mkdir(parents=True, exist_ok=True)
        mount("--rbind", cache, inside)
    for name in ("lib/kubelet", "lib/containerd", "log", "tmp"):
        (var / name).mkdir(parents=True, exist_ok=True)
    (var / "tmp").chmod(0o1777)
    mount("--rbind", var, "/var")
    # As on a real machine, what lies in /run (sockets, leases of pod addresses) vanishes with the power.
    mount("-t", "tmpfs", "-o", "mode=755", "node-run", "/run")
    for path, content in orders["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
    for name, value in orders["private_sysctls"].items():
        cover(Path("/proc/sys") / name, value)
    machine_id = folder / "machine-id"
    if not machine_id.exists():
        machine_id.write_text(os.urandom(16).hex() + "\n")
    cover(Path("/etc/machine-id"), machine_id.read_text())
    for name, value in orders["sysctls"].items():
        (Path("/proc/sys") / name).write_text(value)
    # Pods' volumes must be seen by the node's own programs and the other way round.
    mount("--make-rshared", "/")


def cover(path: Path, content: str) -> None:
    """Let the node read ``content`` at ``path``, and write there, without touching the machine's file."""
    if not path.exists():
        return
    own = Path("/run/heterotrain/covers") / path.relative_to("/")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(content)
    mount("--bind", own, path)


def mount(*arguments: str | Path) -> None:
    """Attach a file system or a folder; the words are those of the program of that name."""
    subprocess.run(["mount", *map(str, arguments)], check=True, stdin=subprocess.DEVNULL)


def supervise(services: dict[str, list[str]], logs: Path, path: str) -> None:
    """Start each service, start it again soon after it ends, and reap whatever lost its parent."""
    running: dict[int, str] = {}
    due_s = dict.fromkeys(services, 0.0)
    environment = {"PATH": path, "HOME": "/root", "TMPDIR": "/var/tmp"}  # noqa: S108  # the node's own folder
    while True:
        for name in [name for name, at_s in due_s.items() if at_s <= time.monotonic()]:
            del due_s[name]
            with (logs / f"{name}.log").open("ab") as log:
                running[start(services[name], log.fileno(), environment)] = name
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG if due_s else 0)
        except ChildProcessError:  # every service has ended and none is due yet
            pid = 0
        if pid == 0:
            time.sleep(0.05)
        if pid in running:
            due_s[running.pop(pid)] = time.monotonic() + RESTART_DELAY_S


def start(command: list[str], log: int, environment: dict[str, str]) -> int:
    """Start a program in a session of its own and return its process number."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    return os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True)


if __name__ == "__main__":
    main()
