"""A trained model as a program that runs without the script: torch.export (.pt2) or ONNX (.onnx), compared with it.

The model's code is the user's own: the script is imported, and its function builds the model. Nothing that is stored in
a checkpoint is executed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from heterotrain.checkpoints.export import Weights
from heterotrain.errors import UsageError

LARGEST_DIFFERENCE: Final = 1e-4
"""Between the outputs of the program and of the model, relative to the largest output."""
BATCH_OF_CHECK: Final = 3
"""Samples of the second comparison, where the first dimension may vary."""
_INPUT = re.compile(r"([a-z]+[0-9]+|bool)?\[([0-9]+(?:,[0-9]+)*)\]")
_LARGEST_TOKEN = 2


def read_inputs(texts: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Return example inputs of the shapes that a user gives, such as ``[2,1,16,16]`` or ``int64[2,128]``.

    Raises:
        UsageError: a text is not of that form.
    """
    found = []
    draw = torch.Generator().manual_seed(0)
    for text in texts:
        match = _INPUT.fullmatch(text.replace(" ", ""))
        kind = getattr(torch, (match[1] or "float32") if match else "", None)
        if match is None or not isinstance(kind, torch.dtype):
            raise UsageError(
                f"the input {text!r} is not a type and a shape, such as float32[2,1,16,16] or int64[2,128]"
            )
        shape = [int(size) for size in match[2].split(",")]
        if kind.is_floating_point:
            found.append(torch.randn(shape, generator=draw).to(kind))
        else:
            found.append(torch.randint(0, _LARGEST_TOKEN, shape, generator=draw).to(kind))
    return tuple(found)


def build(script: Path, function: str, arguments: Mapping[str, Any], weights: Weights) -> torch.nn.Module:
    """Return the script's model with the weights of a checkpoint, for inference.

    Raises:
        UsageError: the script cannot be imported, its function makes no model, or the weights do not fit.
    """
    spec = importlib.util.spec_from_file_location("heterotrain_exported_script", script)
    if spec is None or spec.loader is None:
        raise UsageError(f"{script} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
        model = getattr(module, function)(**arguments)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{script}: {function}({', '.join(arguments)}) does not make a model ({error or type(error).__name__}): "
            "name a function that returns it, in a script with a main guard"
        ) from error
    finally:
        sys.path.remove(str(script.parent))
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{script}: {function} returns {type(model).__name__}, not a torch.nn.Module")
    try:
        model.load_state_dict(weights.state)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        raise UsageError(f"the weights do not fit the model of {function}: {text}") from error
    return model.eval()


def export_program(model: torch.nn.Module, inputs: Sequence[torch.Tensor], out: Path) -> float:
    """Write the model as a program and return the largest relative difference of its outputs from the model's.

    Where all inputs have the same first dimension of at least 2, it may vary later (the batch).

    Args:
        model: in evaluation mode.
        inputs: examples.
        out: ``.pt2`` for torch.export, ``.onnx`` for ONNX; it appears when it is complete and right.

    Raises:
        UsageError: the model cannot be exported, a package is missing, or the outputs differ.
    """
    sizes = {each.shape[0] for each in inputs}
    varies = len(sizes) == 1 and sizes != {1}
    shapes = tuple({0: torch.export.Dim.AUTO} for _ in inputs) if varies else None
    scratch = out.with_name(f".part-{out.name}")
    try:
        with torch.no_grad():
            exported = torch.export.export(model, tuple(inputs), dynamic_shapes=shapes)
            run = _onnx(exported, inputs, scratch) if out.suffix == ".onnx" else _pt2(exported, scratch)
            checks = [tuple(inputs)]
            if varies:
                checks.append(tuple(each[:1].expand(BATCH_OF_CHECK, *each.shape[1:]).clone() for each in inputs))
            difference = max(_difference(run(each), _flat(model(*each))) for each in checks)
    except ModuleNotFoundError as error:
        raise UsageError(f"ONNX needs the package {error.name}: run pip install 'heterotrain[cli,onnx]'") from error
    except Exception as error:
        scratch.unlink(missing_ok=True)
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(f"the model cannot be exported to {out.suffix}: {text}") from error
    if not difference <= LARGEST_DIFFERENCE:
        scratch.unlink(missing_ok=True)
        raise UsageError(
            f"the exported program differs from the model by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}: use "
            "safetensors, and report the model"
        )
    scratch.replace(out)
    return difference


def _pt2(exported: Any, path: Path) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    torch.export.save(exported, path.with_suffix(".pt2"))
    with warnings.catch_warnings():  # PyTorch 2.10 warns of its own way to read the weights
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        module = torch.export.load(path.with_suffix(".pt2")).module()
    return lambda inputs: _flat(module(*inputs))


def _onnx(
    exported: Any, inputs: Sequence[torch.Tensor], path: Path
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    import onnxruntime  # type: ignore[import-not-found]  # noqa: PLC0415  # optional

    program = torch.onnx.export(exported, tuple(inputs), dynamo=True, verbose=False)
    if program is None:
        raise RuntimeError("torch.onnx returned no program")
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = session.run(None, {name: value.numpy() for name, value in zip(names, values, strict=True)})
        return [torch.from_numpy(each) for each in found]

    return run


def _flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return [tensor for each in values for tensor in _flat(each)]


def _difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest wanted value; infinite for other shapes."""
    if [each.shape for each in found] != [each.shape for each in wanted]:
        return float("inf")
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        scale = max(1e-12, float(other.double().abs().max())) if other.numel() else 1.0
        worst = max(worst, float((one.double() - other.double()).abs().max()) / scale if other.numel() else 0.0)
    return worst
