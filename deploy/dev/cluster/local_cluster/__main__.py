"""Starts, ends and breaks the cluster of kind-config.yaml: by kind where a Docker engine runs, else without Docker."""

from __future__ import annotations

import argparse
import shlex
import sys
from types import ModuleType

from local_cluster import control, kind, lifecycle, paths, record
from local_cluster.process import Problem


def main() -> int:
    """Run one command; a problem is told in one sentence."""
    options = _parser().parse_args()
    try:
        _run(options)
    except Problem as problem:
        print(f"problem: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="local_cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    add("setup", "install and build everything a cluster needs, once")
    start = add("up", "start the cluster")
    start.add_argument("--reuse", action="store_true", help="be content with a cluster that runs already")
    add("down", "end the cluster, or what a crash has left of it")
    add("status", "show the nodes with their power and cables")
    add("kubeconfig", "print the path of the administrator's kubeconfig")
    add("env", "print lines for the shell: KUBECONFIG, and PATH with kubectl and helm")
    add("images", "build the project's images, or load them into the running cluster").add_argument(
        "what", choices=("build", "load")
    )
    for name, text in (
        ("power-off", "cut a node's cable, then its power"),
        ("power-on", "give a node its power back"),
        ("unplug", "cut a node's cable"),
        ("plug", "join a node's cable"),
    ):
        add(name, text).add_argument("node")
    return parser


def _backend() -> ModuleType:
    """Return what starts and ends the cluster: kind where it can, unless a cluster without it is there already."""
    return kind if record.load() is None and kind.is_available() else lifecycle


def _run(options: argparse.Namespace) -> None:
    match options.command:
        case "setup":
            _backend().setup()
        case "up":
            _backend().up(reuse=options.reuse)
        case "down":
            _backend().down()
        case "status":
            print(_backend().status())
        case "kubeconfig":
            print(control.kubeconfig_path())
        case "env":
            print(f"export KUBECONFIG={shlex.quote(str(control.kubeconfig_path()))}")
            print(f'export PATH={shlex.quote(str(paths.programs()))}:"$PATH"')
        case "images":
            (_backend().load_images if options.what == "load" else _backend().build_images)()
        case "power-off":
            control.power_off(options.node)
        case "power-on":
            control.power_on(options.node)
        case "unplug":
            control.unplug(options.node)
        case "plug":
            control.plug(options.node)


if __name__ == "__main__":
    sys.exit(main())
