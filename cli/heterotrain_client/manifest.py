"""From a script or a function, and pools, to the objects of a job."""

from __future__ import annotations

import builtins
import dis
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final

from heterotrain_cli.errors import InputError
from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Runtime
from heterotrain_operator.api.explain import shown
from heterotrain_operator.api.text import quoted

SCRIPT_FOLDER: Final = "/script"
SCRIPT_VOLUME: Final = "script"
CONTAINER: Final = "trainer"
MAX_SCRIPT_BYTES: Final = 900_000
"""Largest script: a ConfigMap holds 1 MiB with everything else in it."""
GPU: Final = "nvidia.com/gpu"

Pools = Mapping[str, int | Mapping[str, Any]]
Script = str | Path | Callable[..., Any]


def source_of(script: Script, arguments: Mapping[str, Any] | Sequence[str]) -> tuple[str, str, list[str]]:
    """Return file name, text and command-line arguments of what the pods run.

    Args:
        script: path of a Python file, or a function that needs nothing from outside but its arguments.
        arguments: of the command line for a file, by name for a function.

    Raises:
        InputError: the script cannot be read, or the function needs what the pods do not have.
    """
    if callable(script):
        name, text, given = "function.py", _function_text(script, arguments), []
    elif not isinstance(script, str | Path):
        raise InputError(f"the script is {told(script)}, but must be the path of a Python file, or a function")
    else:
        path = Path(script)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror or "") if isinstance(error, OSError) else "not UTF-8 text"
            raise InputError(f"the script {path} cannot be read ({why}): give the path of a Python file") from error
        if isinstance(arguments, Mapping | str):
            raise InputError('arguments of a script are a list of strings, as on the command line: ["--lr", "0.1"]')
        name, given = path.name, list(map(str, arguments))
    if len(text.encode()) > MAX_SCRIPT_BYTES:
        raise InputError(
            f"the script has {len(text.encode())} bytes, but at most {MAX_SCRIPT_BYTES} fit into a ConfigMap: put it "
            "into the image"
        )
    return name, text, given


def _function_text(function: Callable[..., Any], arguments: Mapping[str, Any] | Sequence[str]) -> str:
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise InputError(f"{name or type(function).__name__} is not a function with a name: write it with def")
    given = arguments or {}
    if not isinstance(given, Mapping):
        raise InputError(f"arguments of the function {name} are a mapping by name, such as {{'lr': 0.1}}")
    if outside := sorted({*function.__code__.co_freevars, *_globals_of(function.__code__)}):
        raise InputError(
            f"the function {name} uses {', '.join(outside)} from outside, which the workers do not have: import or "
            "define it inside the function, or give a script"
        )
    try:
        inspect.signature(function).bind(**given)
        values = json.dumps(dict(given), allow_nan=False)
        text = textwrap.dedent(inspect.getsource(function))
    except (TypeError, ValueError) as error:
        raise InputError(f"the arguments of the function {name} do not fit ({error}): give plain values") from error
    except OSError as error:
        raise InputError(f"the source of the function {name} is not available: put it into a file") from error
    if not text.startswith(("def ", "async def ")):
        raise InputError(f"the function {name} has a decorator or is a lambda: give a plain function")
    loaded = f"json.loads({values!r})"
    return f'{text}\n\nif __name__ == "__main__":\n    import json\n\n    {name}(**{loaded})\n'


def _globals_of(code: CodeType) -> set[str]:
    """Return the global names that a function or a function inside it reads, without those of Python itself."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    found |= {name for const in code.co_consts if isinstance(const, CodeType) for name in _globals_of(const)}
    return {name for name in found if not hasattr(builtins, name) and name != code.co_name}


def job_body(
    name: str,
    *,
    file_name: str,
    arguments: Sequence[str],
    pools: Pools,
    image: str,
    gpus_per_worker: int,
    settings: Mapping[str, Any],
    training: Mapping[str, Any],
    checkpoint: str | None,
    spec: Mapping[str, Any],
    runtime: str,
    pod: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the job's object; see ``HeteroTrainClient.train`` for the arguments.

    ``settings`` has the fields of ``spec.training`` that are arguments of their own there, or ``None`` for each.

    Raises:
        InputError: an argument with fields is of another type.
    """
    _check_types(pools=pools, training=training, spec=spec, pod=pod)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": ["heterotrain-run", f"{SCRIPT_FOLDER}/{file_name}", *arguments],
        "volumeMounts": [{"name": SCRIPT_VOLUME, "mountPath": SCRIPT_FOLDER, "readOnly": True}],
    }
    given = dict(pod)
    added = dict(given.pop("container", {}))
    container["volumeMounts"] += added.pop("volumeMounts", None) or ()
    volumes = [{"name": SCRIPT_VOLUME, "configMap": {"name": script_name(name)}}, *(given.pop("volumes", None) or ())]
    body: dict[str, Any] = {
        "workerPools": [_pool(pool, fields, gpus_per_worker=gpus_per_worker) for pool, fields in pools.items()],
        "template": {"spec": {**given, "containers": [{**container, **added}], "volumes": volumes}},
        **({"runtime": runtime} if runtime != Runtime.HETEROTRAIN else {}),
        **spec,
    }
    if named := {key: value for key, value in settings.items() if value is not None} | dict(training):
        body["training"] = named
    if checkpoint is not None:
        body["checkpoint"] = {"uri": checkpoint}
    return {
        "apiVersion": f"{keys.GROUP}/{keys.VERSION}", "kind": keys.KIND, "metadata": {"name": name}, "spec": body,
    }  # fmt: skip


def _check_types(*, pools: Any, **objects: Any) -> None:
    """Check what is merged here; the rest is checked like a job in YAML.

    Raises:
        InputError: a value is of another type.
    """
    if not isinstance(pools, Mapping):
        raise InputError(f'pools is {told(pools)}, but must be a mapping from names to workers, such as {{"a100": 2}}')
    for name, fields in pools.items():
        if not isinstance(fields, int | Mapping):
            raise InputError(
                f"the pool {quoted(str(name))} is {told(fields)}, but must be the most workers, such as 2, or fields "
                "of spec.workerPools"
            )
    pod = objects["pod"]
    objects["pod['container']"] = pod.get("container", {}) if isinstance(pod, Mapping) else {}
    for name, value in objects.items():
        if not isinstance(value, Mapping):
            raise InputError(f"{name} is {told(value)}, but must be a mapping with fields, as in YAML")


def script_name(job: str) -> str:
    """Return the name of the ConfigMap with the job's script."""
    return f"{job}-script"


def script_body(job: Mapping[str, Any], *, file_name: str, text: str) -> dict[str, Any]:
    """Return the ConfigMap with a created job's script; it is deleted with the job."""
    owner = {
        "apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
    }  # fmt: skip
    metadata = {"name": script_name(job["metadata"]["name"]), "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {file_name: text}}


def _pool(name: str, fields: int | Mapping[str, Any], *, gpus_per_worker: int) -> dict[str, Any]:
    found: dict[str, Any] = {"maxReplicas": fields} if isinstance(fields, int) else dict(fields)
    found.setdefault("nodeSelector", {keys.LABEL_POOL: name})
    if gpus_per_worker and "resources" not in found:
        found["resources"] = {"limits": {GPU: gpus_per_worker}}
    return {"name": name, **found}


def told(value: Any) -> str:
    """Return a wrong value for a message, in at most 60 characters and without passwords."""
    return "None" if value is None else shown(value)


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Check a whole number.

    Raises:
        InputError: it is something else, or below ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {told(value)}, but must be a whole number, at least {least}")


def check_seconds(name: str, value: Any, *, least: float) -> None:
    """Check a time in seconds.

    Raises:
        InputError: it is not a number, not finite, or below ``least``.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise InputError(f"{name} is {told(value)}, but must be a number of seconds, at least {least:g}")
