"""The example that the wheel carries: a script that trains anywhere, and its job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from heterotrain_cli.errors import InputError

NAME: Final = "digits"
_IN_WHEEL: Final = Path(__file__).parents[1] / "examples" / NAME
_IN_CLONE: Final = Path(__file__).parents[3] / "deploy/examples" / NAME


def write_example(folder: Path) -> str:
    """Copy the example into a new folder below ``folder``; return what to do next.

    Raises:
        InputError: the new folder exists, or cannot be written.
    """
    made = folder / NAME
    source = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
    try:
        made.mkdir()
        files = sorted(path for path in source.iterdir() if path.is_file())
        for path in files:
            shutil.copyfile(path, made / path.name)
    except FileExistsError as error:
        raise InputError(f"{made} exists already: remove it, or run this in another folder") from error
    except OSError as error:
        raise InputError(f"{made} cannot be written: {error.strerror}") from error
    return (
        f"wrote {', '.join(str(made / path.name) for path in files)}\n"
        f"train: python {made}/train.py --epochs 2 --samples-per-epoch 4480   (needs PyTorch and scikit-learn)"
    )
