"""``python -m prose_lint [FILE ...]``: print each finding; exit with 1 if there is one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prose_lint.check import Linter, files
from prose_lint.kept import Kept

ROOT = Path(__file__).resolve().parents[4]
EXPLANATION = """
Words are replaced by docs/glossary.md, habits are listed in deploy/dev/prose/prose_lint/habits.toml.
The CRD's texts are written in operator/heterotrain_operator/api and rendered by `make crds`.
Where a rule is wrong, end the line with <!-- prose: allow RULE: reason -->."""


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Check the given files, or all that have prose.

    Args:
        arguments: of the command line.
        root: of the repository.
    """
    parser = argparse.ArgumentParser(prog="prose_lint", description="Check README, docs and the CRD's texts.")
    parser.add_argument("files", nargs="*", type=Path, help="all Markdown and CRDs by default")
    parser.add_argument("--count", action="store_true", help="print the number of findings by file instead")
    options = parser.parse_args(arguments)
    linter = Linter(root)
    chosen = [Path(path).resolve().relative_to(root.resolve()) for path in options.files] or list(files(root))
    kept = Kept(root)
    total = 0
    for path in chosen:
        found = [] if kept.is_clean(path) else linter.findings(path)
        if not found:
            kept.note_clean(path)
        total += len(found)
        if options.count:
            print(f"{len(found):5} {path}")
        else:
            print(*found, sep="\n", end="\n" if found else "")
    kept.save(complete=not options.files)
    if total:
        print(f"\n{total} findings in {len(chosen)} files.{EXPLANATION}", file=sys.stderr)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
