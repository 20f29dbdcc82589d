"""Start, stop and break the cluster of kind-config.yaml: with kind where a Docker engine runs, else without Docker."""

from __future__ import annotations

import argparse
import shlex
import sys
from types import ModuleType

from local_cluster import control, kind, lifecycle, paths, record
from local_cluster.process import Problem


def main() -> int:
    """Run one command; print a problem as one sentence."""
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
    start.add_argument("--reuse", action="store_true", help="accept a cluster that is already running")
    add("down", "stop the cluster, or remove the remains of a crashed one")
    add("status", "show the nodes with their power and network links")
    add("kubeconfig", "print the path of the administrator's kubeconfig")
    add("env", "print lines for the shell: KUBECONFIG, and PATH with kubectl and helm")
    add("images", "build the project's images, or load them into the running cluster").add_argument(
        "what", choices=("build", "load")
    )
    for name, text in (
        ("power-off", "cut a node's network link, then its power"),
        ("power-on", "restore a node's power and network link"),
        ("unplug", "cut a node's network link"),
        ("plug", "restore a node's network link"),
    ):
        add(name, text).add_argument("node")
    return parser


def _backend() -> ModuleType:
    """Return the module that manages the cluster: kind where it is available, unless a cluster without it exists."""
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
