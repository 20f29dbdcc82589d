"""The model's weights out of a checkpoint, as a safetensors file for any program.

Nothing in a checkpoint is executed: its skeleton is read with ``weights_only=True``, and tensors are plain bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from heterotrain_core.uris import redacted
from safetensors.torch import save_file

from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.errors import UsageError
from heterotrain.state.groups import COMPILED

PICKLED = (".pt", ".pth")
"""Endings of files that ``torch.load`` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export has written.

    Attributes:
        step: committed steps of the checkpoint.
        epoch: the epoch that it belongs to, from 0; equal to the number of epochs after the last one.
        tensors: number of tensors in the file.
        size_bytes: their size.
        tied: names that stand for the same weights as another name, by that other name; the file's metadata has them.
    """

    step: int
    epoch: int
    tensors: int
    size_bytes: int
    tied: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The model of a checkpoint.

    Attributes:
        step: committed steps of the checkpoint.
        epoch: the epoch that it belongs to, from 0.
        tensors: by their first name.
        tied: further names of the same tensors, by that first name.
    """

    step: int
    epoch: int
    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Every name with its tensor, for ``load_state_dict``."""
        return self.tensors | {name: self.tensors[kept] for name, kept in self.tied.items()}


def read_weights(uri: str, *, step: int | None = None) -> Weights:
    """Return the model of a checkpoint.

    Args:
        uri: folder of the checkpoints; a path or a URI.
        step: committed steps of the checkpoint; ``None`` for the newest one.

    Raises:
        UsageError: there is no such checkpoint, or it is damaged. There is no fall-back to an older checkpoint, because
            a user would not notice.
    """
    folder = CheckpointFolder(uri, max_to_keep=1)
    try:
        manifest = folder.select(step)
        state = folder.load(manifest, lambda entry: entry.whole if entry.name.startswith("model.") else None)
        model = {name.replace(COMPILED, ""): value for name, value in state["model"].items()}
        progress = state["progress"]
        tensors, tied = _untied(model)
        epoch = int(progress["epoch"])
    except UsageError:
        raise
    except Exception as error:
        why = redacted(str(error)) or type(error).__name__
        which = "the newest checkpoint" if step is None else f"the checkpoint of step {step}"
        raise UsageError(
            f"{which} in {folder.storage.shown} cannot be read ({why}): it is damaged or incomplete. Choose another "
            "one by its step"
        ) from error
    return Weights(step=manifest.step, epoch=epoch, tensors=tensors, tied=tied)


def export_weights(uri: str, out: Path, *, step: int | None = None) -> Exported:
    """Write the model of a checkpoint to ``out``, in safetensors format or, by its name, in that of ``torch.save``.

    An existing file is replaced.

    Args:
        uri: as in ``read_weights``.
        out: the file; it appears when it is complete.
        step: as in ``read_weights``.

    Raises:
        UsageError: there is no such checkpoint, it is damaged, or the file cannot be written.
    """
    found = read_weights(uri, step=step)
    weights, tied, epoch = found.tensors, found.tied, found.epoch
    about = {"format": "pt", "heterotrain.step": str(found.step), "heterotrain.epoch": str(epoch)}
    scratch = out.with_name(f".{out.name}.part")
    try:
        if out.suffix in PICKLED:
            torch.save(found.state, scratch)
        else:
            further = {f"heterotrain.tied.{name}": kept for name, kept in tied.items()}
            save_file(weights, scratch, metadata=about | further)
        scratch.replace(out)
    except Exception as error:
        raise UsageError(f"{out} cannot be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return Exported(step=found.step, epoch=epoch, tensors=len(weights), size_bytes=size_bytes, tied=tied)


def _untied(model: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor under its first name, and the further names of tied weights with the first one."""
    weights: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's own extra state: not weights
        kept = first.setdefault(id(value), name)
        if kept == name:
            weights[name] = value
        else:
            tied[name] = kept
    return weights, tied
