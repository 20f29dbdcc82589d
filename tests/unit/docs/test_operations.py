"""docs/operations.md against the code: every condition, reason, event and alert is explained, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from heterotrain_core.contract.outcome import Cause
from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.decide.faults import INTERNAL_ERROR
from heterotrain_operator.decide.lifecycle import LifeStage
from heterotrain_operator.decide.status.context import HOPELESS
from heterotrain_operator.decide.status.events import _RULES
from support.syntax import parsed

ROOT = Path(__file__).parents[3]
OPERATOR = ROOT / "operator/heterotrain_operator"
GUIDE = (ROOT / "docs/operations.md").read_text()
CONDITIONS, _, REST = GUIDE.partition("\n## Events\n")
EVENTS, _, ALERTS = REST.partition("\n## Alerts\n")
WORD = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
FILES = (
    *sorted((OPERATOR / "decide").rglob("*.py")),
    *(OPERATOR / name for name in ("engine/reconcile.py", "engine/poller.py", "prom/errors.py")),
)


def words(text: str) -> set[str]:
    """Return what the text has in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def strings(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and WORD.fullmatch(each.value):
            yield each.value


def reasons_in_code() -> set[str]:
    """Return the reasons of conditions: what a type of conditions or a ``reason`` gets, but for rules of events."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(parsed(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=name), keywords=given) if name != "_Rule":
                    for each in given:
                        found |= set(strings(each.value)) if each.arg == "reason" else set()
                case ast.Call(func=ast.Attribute(attr="true" | "false" | "unknown"), args=[reason, *_]):
                    found |= set(strings(reason))
                case ast.Assign(targets=[ast.Name(id="reason"), *_], value=value):
                    found |= set(strings(value))
                case ast.FunctionDef(name="why_limited" | "_deadlines" | "_freshness") as function:
                    for each in ast.walk(function):
                        if isinstance(each, ast.Return | ast.Tuple):
                            found |= set(strings(each))
                case _:
                    pass
    return found | HOPELESS | {INTERNAL_ERROR, Cause.NOT_FINITE.value, Cause.COPIES_DIFFERED.value}


def test_every_condition_is_explained() -> None:
    assert {kind.value for kind in ConditionType} - words(CONDITIONS) == set()


def test_every_reason_is_explained() -> None:
    found = reasons_in_code()
    known = {"WaitingForRank", "BackoffLimitExceeded", "NodesShared", "Unavailable", "Late", "NoSeries"}
    assert known <= found, "the search works"
    assert found - words(CONDITIONS) == set()


def test_no_reason_is_explained_that_no_code_has() -> None:
    """A word in the tables of conditions is a condition, a reason, or appears in the operator's source."""
    source = "".join(file.read_text() for file in OPERATOR.rglob("*.py"))
    for line in CONDITIONS.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        for word in words(cells[3]) if len(cells) > 5 else set():
            assert (
                word in {stage.value for stage in LifeStage} | {cause.value for cause in Cause} or f'"{word}"' in source
            )


def test_every_event_is_explained() -> None:
    source = "".join(file.read_text() for file in OPERATOR.rglob("*.py"))
    code = {rule.reason for rule in _RULES.values()} | set(re.findall(r'[eE]vent\((?:\s*|.*reason=)"(\w+)"', source))
    table = {word for line in EVENTS.splitlines() if line.startswith("| `") for word in words(line.split("|")[1])}
    assert table == code


def test_every_alert_is_explained() -> None:
    chart = (ROOT / "helm/heterotrain/templates/monitoring.yaml").read_text()
    table = {word for line in ALERTS.splitlines() if "`HeteroTrain" in line for word in words(line.split("|")[1])}
    assert table == set(re.findall(r"- alert: (\w+)", chart))
