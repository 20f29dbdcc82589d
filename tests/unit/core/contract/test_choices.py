"""Choices of the spec: spelled as in the API, read in any case."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.choices import Backend, Choice, Compression, Precision
from heterotrain_core.contract.plan import Binding, BoundaryKind
from heterotrain_core.scaling_rules import Scaling
from heterotrain_planner.allocate.problem import Objective

KINDS = [Backend, Binding, BoundaryKind, Compression, Objective, Precision, Scaling]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_value_is_camel_case_and_is_read_in_any_case(kind: type[Choice]) -> None:
    for member in kind:
        assert member.value[0].isupper()
        assert member.value.isalnum()
        assert kind(member.value) is kind(member.value.lower()) is kind(member.value.upper()) is member


@pytest.mark.parametrize("value", ["fp8", "", " fp16", None, 16])
def test_anything_else_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="is not a valid Precision"):
        Precision(value)
