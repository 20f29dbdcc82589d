"""The cluster's programs are compiled once, and again only where they are missing or their sources changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_cluster import paths, toolchain


def test_a_program_is_compiled_when_it_is_missing_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (toolchain.Program(package=f"./{name}", module=tmp_path / "module") for name in ("own", "other"))
    for each in ("go.mod", "go.sum", "own/main.go", "other/main.go"):
        (tmp_path / "module" / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "module" / each).write_text("first")
    compiled: list[str] = []

    def compile_instead(_module: Path, programs: list[toolchain.Program]) -> None:
        for program in programs:
            compiled.append(program.name)
            (paths.programs() / program.name).write_text("compiled")

    def build() -> list[str]:
        compiled.clear()
        toolchain.build_programs(other, base=(own,))
        return list(compiled)

    monkeypatch.setenv("HETEROTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(toolchain, "_compile", compile_instead)
    assert build() == ["own", "other"]
    assert build() == []
    (tmp_path / "module/own/main.go").write_text("second")
    assert build() == ["own"]
    (paths.programs() / "other").unlink()
    assert build() == ["other"]
    (tmp_path / "module/go.sum").write_text("second")
    assert build() == ["own", "other"]
