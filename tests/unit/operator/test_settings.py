"""Settings and command-line options have one source: the fields of ``Settings``."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from heterotrain_operator import cli
from heterotrain_operator.settings import (
    PrometheusSettings,
    Settings,
    namespace_weights,
    setting_options,
    settings_from,
)
from support.cli_runner import CliRunner

TEMPLATES = Path(__file__).parents[3] / "helm/heterotrain/templates"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the list that receives the settings of each ``run`` command; nothing is started."""
    found: list[Settings] = []

    async def record(settings: Settings) -> list[BaseException]:
        found.append(settings)
        return []

    monkeypatch.setattr(cli, "_run", record)
    monkeypatch.setattr(cli, "set_up_logs", lambda *_, **__: None)
    return found


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(cli.main, ["run", *arguments], env=environment)


def test_without_options_the_defaults_hold(parsed: list[Settings]) -> None:
    assert run().exit_code == 0
    assert parsed == [Settings()]


def test_every_setting_is_an_option_and_a_variable(parsed: list[Settings]) -> None:
    options = {option.name: option for option in setting_options()}
    assert len(options) == len(fields(Settings)) - 1 + len(fields(PrometheusSettings))
    by_type = {str: "other", int: "7", float: "7.5", Path: "/other", bool: ""}
    value_of = {name: by_type[option.kind] or str(not option.default).lower() for name, option in options.items()} | {
        "namespace-weights": "team=2",
        "egress": "[]",
        "worker-defaults": "{}",
    }
    environment = {f"HETEROTRAIN_OPERATOR_{name.upper().replace('-', '_')}": value for name, value in value_of.items()}
    assert run(**environment).exit_code == 0
    flags = [f"--no-{name}" if option.default is True else f"--{name}" for name, option in options.items()]
    values = [[] if option.kind is bool else [value_of[name]] for name, option in options.items()]
    pairs = zip(flags, values, strict=True)
    assert run(*(part for flag, value in pairs for part in (flag, *value))).exit_code == 0
    by_environment, by_option = parsed
    assert by_environment == by_option
    for each in fields(Settings):
        assert getattr(by_option, each.name) != each.default, each.name
    for each in fields(PrometheusSettings):
        assert getattr(by_option.prometheus, each.name) != each.default, each.name
    assert by_option.prometheus.auth_dir == Path("/other")


def test_an_empty_text_stands_for_no_value() -> None:
    values = {option.parameter: "" if option.default is None else option.default for option in setting_options()}
    assert settings_from(values) == Settings()


@pytest.mark.parametrize(
    "arguments", [("--workers", "0"), ("--prometheus-poll-seconds", "0"), ("--relist-seconds", "x")]
)
def test_a_wrong_value_is_refused(arguments: tuple[str, str]) -> None:
    assert run(*arguments).exit_code == 2


def test_every_variable_that_a_template_sets_is_an_option() -> None:
    named = {
        name
        for template in TEMPLATES.rglob("*.yaml")
        for name in re.findall(r"name: (HETEROTRAIN_OPERATOR_\w+)", template.read_text())
    }
    assert len(named) > 5
    assert named <= {option.envvar for option in cli.run.params}  # type: ignore[attr-defined]  # click's own


def test_weights_of_namespaces_are_read_from_a_list() -> None:
    assert namespace_weights("team-a=3, team-b=0.5") == {"team-a": 3.0, "team-b": 0.5}
    assert namespace_weights("") == {}


@pytest.mark.parametrize("text", ["a b", "/leaving", "x" * 317, "example.com/leaving,Ready"])
def test_an_impossible_announcement_is_refused_before_the_start(parsed: list[Settings], text: str) -> None:
    """The condition Ready would make workers leave every healthy node."""
    result = run("--node-announcements", text)
    assert result.exit_code != 0
    assert "node announcements: " in result.stderr


@pytest.mark.parametrize("text", ["team-a", "team-a=", "=3", "team-a=0", "team-a=-1", "team-a=1e9", "team-a=nan"])
def test_an_impossible_weight_is_refused_before_the_start(parsed: list[Settings], text: str) -> None:
    result = run("--namespace-weights", text)
    assert result.exit_code != 0
    assert f"{text!r} is not NAMESPACE=WEIGHT" in result.stderr
    assert not parsed
