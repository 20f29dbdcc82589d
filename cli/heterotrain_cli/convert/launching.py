"""From the command that starts a script elsewhere to the one for ``heterotrain-run``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

RUN: Final = "heterotrain-run"
_SHELLS: Final = ("bash", "sh", "/bin/bash", "/bin/sh")
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS: Final = frozenset(
    {"--standalone", "--use-env", "--use_env", "--multi_gpu", "--multi-gpu", "--cpu", "--mixed-precision-none", "-u"}
)
_MODULE: Final = ("-m", "--module")
_PYTHON: Final = re.compile(r"^python[0-9.]*$")


def converted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command for the launcher, and what the user still has to do.

    Args:
        words: command and arguments of a container.
    """
    given = list(map(str, words))
    if not given:
        return [RUN, "FILL-IN.py"], ["no command is given there: replace FILL-IN.py by the script and its arguments"]
    if given[0] in _SHELLS and len(given) >= 2 and given[1].startswith("-") and given[1].endswith("c"):  # noqa: PLR2004  # shell and option
        return _from_shell(given[2] if len(given) > 2 else "")  # noqa: PLR2004  # shell, option and text
    found = _launched(given)
    if found is None:
        note = f"the command {given[0]} is not known: it is kept behind {RUN}, which starts Python scripts"
        return [RUN, *given], [note]
    return [RUN, *found], []


def _from_shell(text: str) -> tuple[list[str], list[str]]:
    """Return the same for a shell's commands: the last one that starts a training counts."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [part.strip() for line in joined.splitlines() for part in re.split(r"&&|;", line)]
    lines = [line for line in lines if line and not line.startswith("#")]
    notes: list[str] = []
    for at in reversed(range(len(lines))):
        try:
            words = shlex.split(lines[at], comments=True)
        except ValueError:
            continue
        while words and re.match(r"^\w+=", words[0]):
            words.pop(0)
        if words and words[0] == "exec":
            words.pop(0)
        found = _launched(words)
        if found is None:
            continue
        if others := [line for i, line in enumerate(lines) if i != at]:
            notes.append(
                f"{len(others)} other shell commands are left out ({others[0][:40]} …): put them into the image"
            )
        if any("$" in word for word in found):
            notes.append("the arguments hold variables of a shell, which is not there any more: write values")
        return [RUN, *found], notes
    return [RUN, "FILL-IN.py"], ["the shell commands start no Python script: replace FILL-IN.py by the script"]


def _launched(words: Sequence[str]) -> list[str] | None:
    """Return script and arguments of a command that starts a script, ``None`` for any other command."""
    if not words:
        return None
    program = PurePath(words[0]).name
    rest = list(words[1:])
    if _PYTHON.match(program):
        while rest and rest[0] in ("-u", "-O", "-B"):
            rest.pop(0)
        if len(rest) > 1 and rest[0] == "-m" and rest[1] in _LAUNCHERS:
            return _behind_options(rest[2:])
        return rest if rest and (rest[0] == "-m" or not rest[0].startswith("-")) else None
    if program == "torchrun":
        return _behind_options(rest)
    if program == "accelerate" and rest[:1] == ["launch"]:
        return _behind_options(rest[1:])
    return None


def _behind_options(words: Sequence[str]) -> list[str] | None:
    """Return what follows a launcher's own options: a script with its arguments, or ``-m MODULE``."""
    rest = list(words)
    while rest:
        word = rest[0]
        if word in _MODULE:
            return ["-m", *rest[1:]]
        if not word.startswith("-"):
            return rest
        rest.pop(0)
        takes_value = "=" not in word and word not in _FLAGS
        if takes_value and rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
            rest.pop(0)
    return None
