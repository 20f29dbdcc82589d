"""The prose linter refuses what it has to refuse, and leaves good texts alone."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import pytest
from prose_lint import markdown
from prose_lint.__main__ import main
from prose_lint.check import Linter, files
from prose_lint.glossary import Term, terms
from prose_lint.habits import Habit, findings, habits
from prose_lint.passages import Finding, Passage, words

ROOT = Path(__file__).parents[3]
GOOD = "# A title\n\nThe operator divides the batch. Each worker gets a share of it, e.g. 12 samples.\n"
CRD = """\
kind: CustomResourceDefinition
spec:
  versions:
  - schema:
      openAPIV3Schema:
        properties:
          spec:
            description: The training job.
            x-kubernetes-validations:
            - rule: self.a > 0
              message: 'a has to be positive: raise it'
            properties:
              description:
                description: {text}
                type: string
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the real glossary and texts without findings."""
    for folder in ("docs/adr", "crds"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "docs/glossary.md", tmp_path / "docs")
    (tmp_path / "README.md").write_text(GOOD)
    (tmp_path / "docs/adr/0001-a-choice.md").write_text(GOOD)
    (tmp_path / "crds/job.yaml").write_text(CRD.format(text="A condition of the job."))
    return tmp_path


def rules(repository: Path, path: str, text: str) -> list[str]:
    (repository / path).write_text(text)
    return [finding.rule for finding in Linter(repository).findings(Path(path))]


def sentence(count: int) -> str:
    """Return a sentence of so many words, all different, on lines of at most 80 columns."""
    return textwrap.fill(f"The {' '.join(f'word{n}' for n in range(count - 1))}.", width=80) + "\n"


def test_good_texts_pass(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], root=repository) == 0
    assert capsys.readouterr().out == ""


def test_a_file_is_read_again_after_a_change_of_itself_or_of_the_glossary(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a finding is never skipped, and a run over one file forgets no others."""
    read: list[str] = []
    findings_of = Linter.findings

    def noted(linter: Linter, path: Path) -> list[Finding]:
        read.append(str(path))
        return findings_of(linter, path)

    def reads(*arguments: str) -> list[str]:
        read.clear()
        main(arguments, root=repository)
        return list(read)

    monkeypatch.setattr(Linter, "findings", noted)
    glossary, guide = repository / "docs/glossary.md", repository / "docs/guide.md"
    every = ["README.md", "docs/adr/0001-a-choice.md", "docs/glossary.md", "crds/job.yaml"]
    assert reads() == every
    assert reads() == []
    guide.write_text("One aspect of it.\n")
    assert [reads(), reads(), reads(str(guide))] == [["docs/guide.md"]] * 3
    guide.write_text(GOOD)
    assert reads(str(guide)) == ["docs/guide.md"]
    assert reads() == []
    glossary.write_text(glossary.read_text() + "\nOne more line.\n")
    assert sorted(reads()) == sorted([*every, "docs/guide.md"])


@pytest.mark.parametrize("path", ["README.md", "docs/guide.md", "docs/adr/0001-a-choice.md", "CHANGELOG.md"])
def test_a_line_of_121_columns_fails(repository: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = " ".join(f"word{n:03}" for n in range(15)) + "."
    assert rules(repository, path, f"{line}\n") == []
    assert rules(repository, path, f"{line[:-1]}s.\n") == ["line-length"]
    assert main([], root=repository) == 1
    assert f"{path}:1:121: line-length: 121 columns" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "```\n" + "x " * 70 + "\n```\n",
        "| a | b |\n| --- | --- |\n| " + "one more cell of it " * 7 + " | b |\n",
        "https://example.org/" + "a" * 120 + "\n",
        "- [link](https://example.org/" + "a" * 120 + ")\n",
        "![two words](pictures/" + "a" * 120 + ".png)\n",
        "[name]: https://example.org/" + "a" * 120 + "\n",
        "It shall be so. <!-- prose: allow shall: " + "a reason " * 12 + "-->\n",
    ],
)
def test_what_cannot_be_wrapped_may_be_longer(repository: Path, text: str) -> None:
    assert rules(repository, "docs/guide.md", text) == []


def test_a_replaced_word_in_the_crd_fails(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("aspect", "Allotments", "grounds", "leaver", "HeldUp"):
        assert rules(repository, "crds/job.yaml", CRD.format(text=f"One {word} of it.")) == ["replaced-word"]
    assert main([], root=repository) == 1
    assert 'spec.description: write "straggler" instead of "HeldUp"' in capsys.readouterr().out


def test_each_replaced_word_of_the_glossary_is_found(repository: Path) -> None:
    replaced = [word for term in terms((ROOT / "docs/glossary.md").read_text()) for word in term.replaced]
    assert len(replaced) > 20
    for word in replaced:
        assert "replaced-word" in rules(repository, "docs/guide.md", f"It is a {word} of it.\n"), word


def test_a_sentence_of_31_words_in_the_readme_fails(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rules(repository, "README.md", "Short.\n" + sentence(30)) == []
    assert rules(repository, "README.md", "Short.\n" + sentence(31)) == ["sentence-length"]
    assert main([], root=repository) == 1
    assert "README.md:2:1: sentence-length: 31 words, at most 30" in capsys.readouterr().out


def test_other_documents_may_have_sentences_of_40_words(repository: Path) -> None:
    assert rules(repository, "docs/guide.md", sentence(40)) == []
    assert rules(repository, "docs/guide.md", sentence(41)) == ["sentence-length"]


def test_descriptions_and_messages_of_the_crd_have_at_most_30_words(repository: Path) -> None:
    assert rules(repository, "crds/job.yaml", CRD.format(text=" ".join(sentence(31).split()))) == ["sentence-length"]
    long_message = CRD.format(text="Short.").replace("a has to be positive: raise it", " ".join(sentence(31).split()))
    assert rules(repository, "crds/job.yaml", long_message) == ["sentence-length"]


@pytest.mark.parametrize("habit", habits(), ids=lambda habit: habit.name)
def test_a_habit_finds_its_own_examples(habit: Habit) -> None:
    assert habit.wrong
    assert habit.write
    for text in habit.wrong:
        assert found(habit, text), text
    for text in habit.right:
        assert not found(habit, text), text


def found(habit: Habit, text: str) -> bool:
    return any(findings(markdown.read(Path("a.md"), text), (habit,)))


def test_habits_are_found_across_line_ends_and_not_in_code(repository: Path) -> None:
    assert rules(repository, "docs/guide.md", "It tries in\nvain.\n") == ["in-vain"]
    assert (
        rules(repository, "docs/guide.md", "Call `in vain`, see [a page](in/vain/shall) or\n\n```\nshall\n```\n") == []
    )


def test_a_standard_style_is_checked_too(repository: Path) -> None:
    assert rules(repository, "docs/guide.md", "It is the the most unique of them.\n") != []


def test_an_exception_names_a_rule_and_a_reason(repository: Path) -> None:
    text = "It shall be so.{}\n"
    assert rules(repository, "docs/guide.md", text.format("")) == ["shall"]
    assert rules(repository, "docs/guide.md", text.format(" <!-- prose: allow shall: quotes a law -->")) == []
    assert rules(repository, "docs/guide.md", text.format(" <!-- prose: allow mend: quotes a law -->")) == [
        "exception",
        "shall",
    ]
    assert rules(repository, "docs/guide.md", text.format(" <!-- prose: allow shall -->")) == ["exception"]


def test_an_exception_on_its_own_line_covers_the_paragraph_below(repository: Path) -> None:
    comment = "<!-- prose: allow shall: quotes a law -->\n"
    assert rules(repository, "docs/guide.md", f"{comment}It is so.\nIt shall be so.\n") == []
    assert rules(repository, "docs/guide.md", f"{comment}It shall be so.\n\nIt shall be so.\n") == ["shall"]


def test_only_a_changelog_may_quote_replaced_words(repository: Path) -> None:
    text = 'The condition `HeldUp` and the word "allotment" have other names.\n'
    assert rules(repository, "CHANGELOG.md", text) == []
    assert rules(repository, "docs/guide.md", text) == ["replaced-word", "replaced-word"]
    assert rules(repository, "CHANGELOG.md", "It is an allotment.\n") == ["replaced-word"]


def test_a_term_may_contain_a_word_that_another_one_replaces(repository: Path) -> None:
    assert rules(repository, "docs/guide.md", "The ground truth is hidden.\n") == []
    assert rules(repository, "docs/guide.md", "The ground is hidden.\n") == ["replaced-word"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("See e.g. this, i.e. that.", ["See e.g. this, i.e. that."]),
        ("It costs 3.50 in v1.2: cheap; good.", ["It costs 3.50 in v1.2: cheap; good."]),
        ("**Shares.** Each (as said.) gets one.", ["**Shares.**", "Each (as said.)", "gets one."]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, expected: list[str]) -> None:
    passage = Passage(path=Path("a.md"), line=1, column=1, raw=text, text=text)
    assert [part for _, part in passage.sentences()] == expected


def test_code_and_addresses_count_as_one_word_each() -> None:
    text = "Call `a b c`, or [this page](https://example.org/x) — 3.5 s."
    (passage,) = markdown.read(Path("a.md"), text).passages
    assert words(passage.text) == len(["Call", "a b c", "or", "[this", "page](…)", "3.5", "s"])


def test_rows_of_the_glossary_need_four_columns() -> None:
    assert terms("| *a* | b | | `c`, d |") == (Term(name="a", meaning="b", replaced=("c",)),)
    with pytest.raises(ValueError, match="line 1 of the glossary"):
        terms("| a | b | c |")


def test_all_documents_are_checked() -> None:
    found = {str(path) for path in files(ROOT)}
    assert {
        "README.md",
        "docs/glossary.md",
        "docs/architecture.md",
        "crds/heterotrain.dev_heterotrainjobs.yaml",
    } <= found
    assert "docs/adr/0001-hash-locked-requirement-lists.md" in found


def test_the_glossary_has_no_findings() -> None:
    assert Linter(ROOT).findings(Path("docs/glossary.md")) == []


def test_terms_are_defined_once_and_are_not_replaced_by_others() -> None:
    listed = terms((ROOT / "docs/glossary.md").read_text())
    names = [term.name for term in listed]
    replaced = [word.lower() for term in listed for word in term.replaced]
    assert len(set(names)) == len(names)
    assert len(set(replaced)) == len(replaced)
    assert not set(replaced) & set(names)
