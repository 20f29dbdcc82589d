"""From the command that starts a training elsewhere to the one for ``heterotrain-run``.

A job that starts another program than the training is worse than none. So where several commands could be the training,
none is chosen, and all are named.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import Final

RUN: Final = "heterotrain-run"
_SHELLS: Final = ("bash", "sh", "dash", "zsh")
_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner", "accelerate")
_FLAGS: Final = frozenset(
    {
        *("--standalone", "--use-env", "--use_env", "--multi_gpu", "--multi-gpu", "--cpu", "-u", "--use_deepspeed"),
        *("--use_fsdp", "--same_network", "--allow-run-as-root", "--oversubscribe", "--bind_cores_to_rank", "--no_ssh"),
        *("--force_multi", "--no_local_rank", "--enable_each_rank_log", "--verbose"),
    }
)
_MODULE: Final = ("-m", "--module")
_NO_PYTHON: Final = ("--no-python", "--no_python")
_PROCESSES: Final = ("--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus")
_RESTARTS: Final = ("--max-restarts", "--max_restarts")
_PYTHON: Final = re.compile(r"^python[0-9.]*$")
_PREPARING: Final = (
    "pip pip3 pipx uv conda mamba apt apt-get yum dnf apk npm make git wget curl aws gsutil gcloud az hf "
    "huggingface-cli wandb tar unzip cp mv rm ln chmod chown touch tee set echo printf source . mkdir ls pwd cat env "
    "ulimit umask sleep date nvidia-smi rocm-smi hostname whoami true false exit wait trap test [ [[ unset shopt "
    "which command df free nproc module sudo ssh-keygen service sysctl ldconfig break continue return :"
)
_HARMLESS: Final = frozenset(_PREPARING.split())
"""Programs that prepare a training; what they do has to be in the image."""
_MOST_SHOWN: Final = 100
_SEPARATORS: Final = frozenset({"\n", ";", "&&", "||", "&", ";;", "(", ")"})
_KEYWORDS: Final = frozenset({"if", "then", "else", "elif", "do", "while", "until", "time", "!", "{"})
_ENDS: Final = frozenset({"fi", "done", "esac", "}"})


@dataclass(slots=True, kw_only=True)
class Launch:
    """What a worker starts.

    Attributes:
        command: for ``heterotrain-run``.
        notes: what the user still has to do.
        processes: of each worker, as its launcher was told; ``None`` where it was not.
        restarts: failures after which its launcher gives up; ``None`` where that was not said.
        variables: that the shell has set to plain values.
        folder: in which it starts; empty for that of the image.
    """

    command: list[str]
    notes: list[str] = field(default_factory=list)
    processes: int | None = None
    restarts: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A script with its arguments, and whether a launcher of several processes starts it."""

    words: list[str]
    by_launcher: bool = False
    options: tuple[tuple[str, str], ...] = ()


def converted(words: Sequence[str], known: Collection[str] = ()) -> Launch:
    """Return the command for the launcher.

    Args:
        words: command and arguments of a container.
        known: names of the container's variables, which Kubernetes puts into commands.
    """
    given = list(map(str, words))
    if not given:
        return _unknown("no command is given there: replace FILL-IN.py by the script and its arguments")
    if (text := _shell_text(given)) is not None:
        return _from_shell(text, known)
    found = _started(given)
    if found is None:
        shown = " ".join(given)[:_MOST_SHOWN]
        return _unknown(f"the command {shown} is not known: replace FILL-IN.py by the Python script that it starts")
    return _launch(found, known)


def _shell_text(words: Sequence[str]) -> str | None:
    """Return the text after the option ``-c`` of a shell; ``None`` for any other command."""
    if PurePath(words[0]).name not in _SHELLS:
        return None
    at = next((i for i, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    return words[at + 1] if len(words) > at + 1 else None


def _unknown(note: str, *more: str) -> Launch:
    return Launch(command=[RUN, "FILL-IN.py"], notes=[note, *more])


def _launch(found: _Started, known: Collection[str]) -> Launch:
    command = [_for_kubernetes(word, known) for word in found.words]
    launch = Launch(command=[RUN, *command])
    for option, value in found.options:
        if option in _PROCESSES and value.isdecimal():
            launch.processes = int(value)
        elif option in _RESTARTS and value.isdecimal():
            launch.restarts = int(value)
    if any("$" in re.sub(r"\$\(\w+\)", "", word) for word in command):
        launch.notes.append("the arguments hold variables of a shell, which is not there any more: write values")
    return launch


def _for_kubernetes(word: str, known: Collection[str]) -> str:
    """Return a word with the container's own variables as Kubernetes writes them."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: f"$({m[1] or m[2]})" if (m[1] or m[2]) in known else m[0], word)


@dataclass(slots=True)
class _Script:
    """What the commands of a shell do, one after the other.

    Attributes:
        variables: with plain values.
        folder: in which the next command starts.
        others: what else is done, which the image has to have.
        started: script and folder of each command that starts one.
        unclear: commands that may start one.
    """

    variables: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    others: list[str] = field(default_factory=list)
    started: list[tuple[str, _Started, str]] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)

    def read(self, command: Sequence[str]) -> None:
        """Follow one command."""
        words, shown = list(command), " ".join(command)[:_MOST_SHOWN]
        while words and re.match(r"^\w+=", words[0]):
            self._assign(words.pop(0))
        if words[:1] == ["export"]:
            for word in words[1:]:
                self._assign(word)
            return
        if words[:1] == ["exec"]:
            words.pop(0)
        if not words:
            return
        if (text := _shell_text(words)) is not None:
            for inner in commands_of(text) or [["unreadable", text[:_MOST_SHOWN]]]:
                self.read(inner)
        elif words[0] == "cd" and len(words) > 1:
            inside = self.folder and not words[1].startswith("/")
            self.folder = f"{self.folder}/{words[1]}" if inside else words[1]
        elif (found := _started(words)) is not None:
            self.started.append((shown, found, self.folder))
        elif PurePath(words[0]).name in _HARMLESS or _is_pip(words):
            self.others.append(shown)
        else:
            self.unclear.append(shown)

    def _assign(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if equals and not re.search(r"[$`]", value):
            self.variables[name] = value
        else:
            self.others.append(f"export {word}"[:_MOST_SHOWN])


def _from_shell(text: str, known: Collection[str]) -> Launch:
    """Return the same for the commands of a shell: the only one that starts a training."""
    commands = commands_of(text)
    if commands is None:
        return _unknown("the shell commands cannot be read: replace FILL-IN.py by the script that they start")
    script = _Script()
    for command in commands:
        script.read(command)
    by_launcher = [each for each in script.started if each[1].by_launcher]
    chosen = by_launcher or ([] if script.unclear else script.started)
    if len(chosen) != 1:
        several = [*(shown for shown, *_ in script.started), *script.unclear]
        if not several:
            return _unknown("the shell commands start no Python script: replace FILL-IN.py by the script")
        return _unknown(f"which command is the training is not clear ({'; '.join(several)}): replace FILL-IN.py by it")
    shown, found, folder = chosen[0]
    launch = _launch(found, {*known, *script.variables})
    launch.variables = script.variables
    if folder.startswith("/"):
        launch.folder = folder
    elif folder:
        launch.notes.append(f"the script starts in {folder} below the image's folder: set workingDir")
    others = [*script.others, *script.unclear, *(each for each, *_ in script.started if each != shown)]
    launch.notes += [f"left out: the shell command {each}: put what it does into the image" for each in others]
    return launch


def _is_pip(words: Sequence[str]) -> bool:
    return bool(_PYTHON.match(PurePath(words[0]).name)) and words[1:3] in (["-m", "pip"], ["-m", "venv"])


def _started(words: Sequence[str]) -> _Started | None:
    """Return script and arguments of a command that starts a script, ``None`` for any other command."""
    if not words:
        return None
    program, rest = PurePath(words[0]).name, list(words[1:])
    if program == "torchrun":
        return _behind_options(rest)
    if program == "accelerate":
        return _behind_options(rest[1:]) if rest[:1] == ["launch"] else None
    if program == "deepspeed":
        return _behind_options(rest)
    if program in ("mpirun", "mpiexec", "horovodrun"):
        return _behind_mpi(rest)
    if program.endswith(".py"):
        return _Started(words=list(words))
    if not _PYTHON.match(program):
        return None
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m" and rest[1] in _MODULES:
        return _behind_options(rest[3 if rest[1] == "accelerate" else 2 :])
    if not rest or _is_pip(words) or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        return None
    return _Started(words=rest)


def _behind_options(words: Sequence[str]) -> _Started | None:
    """Return what follows a launcher's own options: a script with its arguments, or ``-m MODULE``."""
    rest, program = list(words), False
    options: list[tuple[str, str]] = []
    while rest:
        word = rest[0]
        if word in _MODULE:
            return _Started(words=["-m", *rest[1:]], by_launcher=True, options=tuple(options))
        if not word.startswith("-"):
            if program:  # it starts any program: only Python is one that a job starts
                inner = _started(rest)
                return None if inner is None else _Started(words=inner.words, by_launcher=True, options=tuple(options))
            return _Started(words=rest, by_launcher=True, options=tuple(options))
        rest.pop(0)
        program = program or word in _NO_PYTHON
        name, equals, value = word.partition("=")
        if not equals and word not in (*_FLAGS, *_NO_PYTHON) and rest and not rest[0].startswith("-"):
            if rest[0].endswith(".py"):
                continue
            value = rest.pop(0)
        options.append((name, value))
    return None


def _behind_mpi(words: Sequence[str]) -> _Started | None:
    """Return the Python script that a launcher of MPI starts; its options have too many forms to be known."""
    at = next((i for i, word in enumerate(words) if _PYTHON.match(PurePath(word).name) or word.endswith(".py")), None)
    if at is None:
        return None
    rest = list(words[at:])
    inner = _started(rest) if not rest[0].endswith(".py") else _Started(words=rest)
    return None if inner is None else _Started(words=inner.words, by_launcher=True, options=tuple(_pairs(words[:at])))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in pairwise(words) if name.startswith("-"))


def commands_of(text: str) -> list[list[str]] | None:
    """Return the words of each simple command, without redirections and without what output is piped into.

    ``None`` for a text with unequal quotes or a document in it, which is not read.
    """
    if "<<" in text:
        return None
    joined = re.sub(r"\\\n", " ", text)
    joined = re.sub(r"^\s*#.*$|(?<=\s)#[^\n\"']*$", "", joined, flags=re.MULTILINE)
    joined = re.sub(r"\$\([^()]*\)", "$SUBSTITUTED", joined)
    lexer = shlex.shlex(joined, posix=True, punctuation_chars="\n;&|<>()")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    found: list[list[str]] = [[]]
    skip_word = piped = False
    try:
        for token in lexer:
            kind = _kind(token)
            if kind == "word" and skip_word:
                skip_word = False
            elif kind == "redirect":
                skip_word = True
                if found[-1] and found[-1][-1].isdecimal():  # 2>&1
                    found[-1].pop()
            elif kind == "separator":
                found.append([])
                skip_word = piped = False
            elif kind == "pipe":
                piped = True
            elif not piped and (found[-1] or token not in _KEYWORDS):
                found[-1].append(token)
    except ValueError:
        return None
    loops = ("for", "case", "function", "select")
    return [words for words in found if words and words[0] not in (*_ENDS, *loops)]


def _kind(token: str) -> str:
    stripped = token.strip("\n") or "\n"
    if set(token) <= set("\n;&|<>()"):
        if stripped in ("|", "|&"):
            return "pipe"
        if set(stripped) & set("<>"):
            return "redirect"
        return "separator"
    return "word"
