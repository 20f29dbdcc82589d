"""The check of the documentation site sees what a reader sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.site_check import browser, faults

DOT = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
WIDE = '<div style="width: 300px"><table><tr><td style="min-width: 500px">wide</td></tr></table></div>'
FITS = '<div style="width: 300px; overflow-x: auto"><table><tr><td>fits</td></tr></table></div>'


@pytest.mark.heavy
def test_wide_tables_and_broken_pictures_are_found_on_every_page(tmp_path: Path) -> None:
    program = browser()
    if program is None:
        pytest.skip("no browser is installed")  # `make docs` says the same and goes on
    (tmp_path / "docs").mkdir()
    (tmp_path / "good.html").write_text(f'<body>{FITS}<img src="{DOT}"></body>')
    (tmp_path / "docs/bad.html").write_text(f'<body>{WIDE}<img src="none.png"></body>')
    found = faults(tmp_path, program)
    assert [each.split(":")[0] for each in found] == ["docs/bad.html"] * 2
    assert "px wider than its column: wide" in found[0]
    assert found[1].endswith("a picture is broken: none.png")
