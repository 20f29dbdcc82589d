"""The command ``heterotrain``: imports its parts, or names the extra that is not installed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from heterotrain_core.extras import missing_extra
from heterotrain_core.version import __version__

_PLUGIN = "kubectl-htj"
"""Name of the program as kubectl finds it; people write it as two words."""
_BARE_HELP = f"""heterotrain {__version__}: one PyTorch training job on mixed GPUs

This installation has no extra, so it has none of the commands. Install what you need:
  pip install 'heterotrain[cli]'          jobs on a cluster, forecast; jobs from Python
  pip install 'heterotrain[trainer]'      import heterotrain in a training script, heterotrain-run
  pip install 'heterotrain[export]'       heterotrain export, together with cli
  pip install 'heterotrain[onnx]'         the same, with files for ONNX
  pip install 'heterotrain[tensorboard]'  curves for TensorBoard
  pip install 'heterotrain[operator]'     the operator itself; usually an image and the chart"""


def main() -> None:
    """Run the command; without its packages, end with help or one sentence instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of ASCII shows a question mark for a dash
    try:
        from heterotrain_cli.main import main as command  # noqa: PLC0415  # this import is what may fail
    except ModuleNotFoundError as error:
        sentence = missing_extra(error, what="heterotrain", extra="cli")
        if not sentence:
            raise
        match sys.argv[1:]:
            case [] | ["-h" | "--help"]:
                print(_BARE_HELP)
            case ["--version"]:
                print(f"heterotrain, version {__version__}")
            case _:
                sys.exit(sentence)
        return
    command(prog_name="kubectl htj" if Path(sys.argv[0]).name == _PLUGIN else "heterotrain")
