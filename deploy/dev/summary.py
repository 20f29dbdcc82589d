"""Add up JUnit result files and print one closing line. Usage: summary.py FILE [FILE …]."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


def main(paths: list[str]) -> None:
    """Print ``N passed, N failed, N skipped`` over all files."""
    tests = failed = skipped = 0
    for path in paths:
        for suite in ET.parse(path).getroot().iter("testsuite"):  # noqa: S314  # the project's own test run wrote them
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    print(f"\n{tests - failed - skipped} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main(sys.argv[1:])
