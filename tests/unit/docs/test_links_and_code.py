"""README and documents: no dead link, and every block of code runs, parses, or is valid for the API.

A block is checked by its language. A block without one is checked where it shows commands of this project: names and
options exist. Blocks of Python are compiled; those that are whole scripts run in other tests.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from heterotrain_cli.main import COMMANDS
from heterotrain_cli.main import main as cli
from heterotrain_operator.api.admission import read_new_job

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "helm/heterotrain/README.md",
    ROOT / "deploy/dev/cluster/README.md", ROOT / "research/README.md",
]  # fmt: skip
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
COMMAND = re.compile(r"^(?:\$ )?((?:heterotrain|kubectl htj) (?:[^\n\\]|\\\n)*)", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in HEADING.findall(text)} | set(ANCHOR.findall(text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_no_link_is_dead(path: Path) -> None:
    dead = []
    for target in LINK.findall(FENCED.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue  # the internet changes without us
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(target)
    assert dead == []


def test_every_document_is_linked_from_the_readme_or_another_one() -> None:
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in DOCUMENTS
        for target in LINK.findall(path.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", target)
    }
    lost = [name(path) for path in ROOT.glob("docs/*.md") if path.resolve() not in linked]
    assert lost == []


def test_what_contributors_are_told_to_touch_is_there() -> None:
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## To change")[2].partition("\n## ")[0]
    paths = re.findall(r"`([^`]+/[^`]+)`", recipes)
    assert recipes.count("\n- **") >= 8
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def blocks(language: str) -> Iterator[Any]:
    for path in DOCUMENTS:
        for number, (found, text) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8"))):
            if found == language:
                yield pytest.param(text, id=f"{name(path)} {number}")


@pytest.mark.parametrize("text", list(blocks("python")))
def test_python_compiles(text: str) -> None:
    compile(text, "block", "exec")


@pytest.mark.parametrize("text", list(blocks("yaml")))
def test_yaml_is_valid_and_jobs_are_accepted(text: str) -> None:
    for document in yaml.safe_load_all(text):
        if (
            isinstance(document, dict)
            and document.get("kind") == "HeteroTrainJob"
            and "workerPools" in document["spec"]
        ):
            read_new_job(document)


def test_no_other_language_goes_unchecked() -> None:
    used = {language for path in DOCUMENTS for language, _ in BLOCK.findall(path.read_text(encoding="utf-8"))}
    assert used <= {"", "python", "yaml"}


def commands() -> Iterator[Any]:
    for path in DOCUMENTS:
        for _, text in BLOCK.findall(path.read_text(encoding="utf-8")):
            for found in COMMAND.findall(text):
                line = re.sub(r"\s+#.*$", "", found.replace("\\\n", " ")).strip()
                yield pytest.param(line, id=f"{name(path)}: {line[:60]}")


@pytest.mark.parametrize("line", list(commands()))
def test_commands_have_names_and_options_that_exist(line: str) -> None:
    words = shlex.split(line.replace("…", ""))
    words = words[2:] if words[0] == "kubectl" else words[1:]
    if words[0].startswith("-"):
        return
    assert words[0] in COMMANDS, words[0]
    if words[0] == "bench":  # it loads nothing of PyTorch before it runs
        words = words[: words.index("--")] if "--" in words else words
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words[1:] if word.startswith("-") and word != "-"}
    assert used - known - {"--help", "-h"} == set()


def test_every_command_is_documented_with_an_example() -> None:
    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert [each for each in COMMANDS if f"`{each}" not in text and f"heterotrain {each}" not in text] == []


def test_the_table_of_commands_names_no_others() -> None:
    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {found for cell in cells for found in re.findall(r"`([a-z-]+)(?: [^`]*)?`", cell)}
    assert len(named) >= 20
    assert named - set(COMMANDS) == set()


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/examples/*/*.yaml")), ids=name)
def test_manifests_of_the_examples_are_valid(path: Path) -> None:
    objects = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert all({"apiVersion", "kind", "metadata"} <= each.keys() for each in objects)
    for each in objects:
        if each["kind"] == "HeteroTrainJob":
            read_new_job(each)
