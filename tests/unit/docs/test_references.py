"""Every field, public name and metric is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from lab import fields_reference
from support.syntax import parsed

ROOT = Path(__file__).parents[3]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
CODE = "\n".join(re.findall(r"```(?:\w*)\n(.*?)```", TEXT, re.DOTALL)) + "\n".join(re.findall(r"`([^`\n]+)`", TEXT))

MOST_FIELDS = 149


def public(file: str, class_name: str) -> set[str]:
    """Return the public methods and properties of a class, without loading PyTorch."""
    tree = parsed((ROOT / "trainer/heterotrain" / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def test_every_field_has_an_entry_that_explains_it() -> None:
    """Objects have sections, and no table is wider than a page."""
    text = fields_reference.text()
    entries = re.findall(r"^- (?:<a id=\"[^\"]+\"></a>)?`(\w+)` \(([^\n]+?)\): ([^\n]*)$", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^- ", text, re.MULTILINE))
    assert 100 < len(entries) <= MOST_FIELDS, "a field that comes says who sets it, and which one goes (docs/adr/0058)"
    assert [name for name, _, meaning in entries if len(meaning) < 10] == []
    assert len(re.findall(r"^#+ spec", text, re.MULTILINE)) > 10
    assert "\n|" not in text


@pytest.mark.parametrize(
    ("classes", "usual"),
    [
        ({"session.py": "Job", "registered_objects.py": "RegisteredObjects"}, "job"),
        ({"steps/step.py": "Step", "steps/step_passes.py": "StepPasses"}, "step"),
    ],
)
def test_every_public_method_is_shown_somewhere(classes: dict[str, str], usual: str) -> None:
    methods = {each for file, class_name in classes.items() for each in public(file, class_name)}
    methods -= {"is_awaited", "has_exchanged", "withdraw"}  # for the library itself
    assert len(methods) > 5
    assert [each for each in sorted(methods) if not re.search(rf"\b{usual}\.{each}\b", CODE)] == []


def test_every_argument_of_init_is_shown_somewhere() -> None:
    tree = parsed((ROOT / "trainer/heterotrain/initialization.py").read_text(encoding="utf-8"))
    (init,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "init"]
    names = [argument.arg for argument in init.args.kwonlyargs]
    assert [each for each in names if not re.search(rf"\b{each}\b", CODE)] == []


def test_the_site_has_a_page_for_every_document_and_every_public_name() -> None:
    """``make docs`` takes longer, and fails on dead links as well."""
    contents = (ROOT / "deploy/dev/site/contents.txt").read_text()
    assert [path.stem for path in ROOT.glob("docs/*.md") if f"\ndocs/{path.stem}\n" not in contents] == []
    page = (ROOT / "deploy/dev/site/python-api.md").read_text()
    for package in ("trainer/heterotrain", "cli/heterotrain_client"):
        assert [each for each in exported(package) if f".{each}\n" not in page and each != "__version__"] == [], package


def exported(package: str) -> list[str]:
    """Return the names that a package exports, without loading it."""
    tree = parsed((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    return list(names)


def test_every_public_name_of_the_packages_is_shown_somewhere() -> None:
    for package in ("trainer/heterotrain", "cli/heterotrain_client"):
        assert [each for each in exported(package) if not re.search(rf"\b{each}\b", CODE)] == [], package


def test_the_index_of_decisions_names_every_record_with_its_title_and_its_status() -> None:
    """A record that does not name a later one of its amendments would mislead: both sides are compared."""
    folder = ROOT / "docs/adr"
    rows = {
        file: (title, status)
        for title, file, status, line in re.findall(
            r"^\| \[(.+)\]\((\d{4}-.+\.md)\) \| (.+?) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE
        )
        if len(line) > 20
    }
    records = sorted(folder.glob("[0-9]*.md"))
    assert [path.name for path in records] == list(rows), "one row for each record, in order"
    for path in records:
        title, status = rows[path.name]
        assert path.read_text().splitlines()[0] == f"# {title}"
        assert re.fullmatch(r"accepted|(amended|replaced) by \d+(, \d+)*", status), path.name
        for number in re.findall(r"\d+", status):
            (later,) = folder.glob(f"{int(number):04}-*.md")
            assert later.name in path.read_text() or path.name in later.read_text(), "one of both names the other"


def test_every_target_and_variable_of_make_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/README.md"))
    named = "\n".join(path.read_text() for path in pages)
    targets = re.findall(r"(?:`|^)(?:[A-Z]+=\S+ )?make ([a-z-]+)", named, re.MULTILINE)
    assert len(targets) > 20
    assert [each for each in targets if not re.search(rf"^{each}:", makefile, re.MULTILINE)] == []
    variables = re.findall(r"([A-Z_]+)=", "\n".join(re.findall(r"^[a-z-]+:.*?## (.*)", makefile, re.MULTILINE)))
    assert len(variables) > 5
    assert [each for each in variables if not re.search(rf"\$\([^)]*\b{each}\b", makefile)] == []
