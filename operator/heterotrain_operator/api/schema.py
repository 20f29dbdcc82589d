"""From pydantic models to the structural schema that a CRD may hold.

The API server accepts a subset of JSON schema: no references, no ``anyOf`` with null, no titles. The models themselves
carry the validation rules and the list types that server-side apply needs (class argument ``rules``, ``MapList``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

PRESERVE = "x-kubernetes-preserve-unknown-fields"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRule:
    """One validation rule, stated once for the API server and for the operator.

    The API server evaluates the CEL expression. The operator evaluates ``holds`` when it reads an object, because the
    rules may be newer than the object.

    Attributes:
        cel: expression over ``self`` as users write it.
        message: the sentence for the user when the rule does not hold.
        holds: the same on the model. ``None`` for transition rules (``oldSelf``) and for the pod template, whose
            mistakes must not stop running workers (``decide.objects.pods.template_problem``).
        admits: the same on the model, for rules of the pod template: only for jobs that are not applied yet.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    admits: Callable[[Any], bool] | None = None


class Model(BaseModel):
    """A part of the custom resource: camelCase outside, frozen inside; unknown fields are ignored when reading.

    Class arguments: ``rules`` of this object; ``preserve=True`` keeps fields that the schema does not name.
    """

    # Validators are built when they are first used: a command that reads no spec, or no status, needs none of them.
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore", defer_build=True
    )
    rules: ClassVar[tuple[SpecRule, ...]] = ()
    preserves_unknown: ClassVar[bool] = False

    def __init_subclass__(cls, *, rules: tuple[SpecRule, ...] = (), preserve: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.rules = rules
        cls.preserves_unknown = preserve

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message} for rule in cls.rules]
        if cls.preserves_unknown:
            schema[PRESERVE] = True
        for field in cls.model_fields.values():
            # The API server fills nested defaults only below an object that is there, and judges our rules on the
            # default itself: an absent object has to become a complete one.
            factory = field.default_factory
            if isinstance(factory, type) and issubclass(factory, Model):
                complete = factory().model_dump(mode="json", by_alias=True, exclude_none=True)
                schema["properties"][field.alias]["default"] = {k: v for k, v in complete.items() if v not in ({}, [])}
        return schema


def broken_rules(model: Model, path: str, *, new: bool = False) -> Iterator[str]:
    """Yield a sentence for each rule that does not hold, the innermost first.

    A rule of an object may rely on the rules of its parts: take the first one.

    Args:
        model: the object.
        path: of the object, for the sentence.
        new: evaluate the rules of the pod template, too.
    """
    for name, field in type(model).model_fields.items():
        value, at = getattr(model, name), f"{path}.{field.alias}"
        if isinstance(value, Model):
            yield from broken_rules(value, at, new=new)
        elif isinstance(value, tuple):
            for item in value:
                if isinstance(item, Model):
                    yield from broken_rules(item, f"{at}[{getattr(item, 'name', '')}]", new=new)
    for rule in model.rules:
        holds = rule.holds or (rule.admits if new else None)
        if holds is not None and not holds(model):
            yield f"{path}: {rule.message}"


def MapList(*names: str) -> dict[str, Any]:  # noqa: N802  # reads like the type that it stands for
    """Return the markers of a list whose items are told apart by ``names``: appliers may own different items."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(names)}


def structural(model: type[Model]) -> dict[str, Any]:
    """Return the model's schema in the form that ``openAPIV3Schema`` of a CRD takes."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    definitions = schema.pop("$defs", {})
    result = _structural(schema, definitions)
    assert isinstance(result, dict)  # noqa: S101  # a model is always an object
    return result


def _structural(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_structural(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "x-kubernetes-int-or-string" in node:
        return node  # its form is prescribed to the letter
    node = dict(node)
    if reference := node.pop("$ref", None):
        target = definitions[reference.removeprefix("#/$defs/")]
        node = {**target, **node}
    if "anyOf" in node:
        (only,) = [option for option in node.pop("anyOf") if option != {"type": "null"}]
        node = {**_structural(only, definitions), **node}
    node.pop("title", None)
    if node.get("default") in (None, [], ()):
        node.pop("default", None)
    if node.get("type") == "integer":
        node.setdefault("format", "int64")
    if "properties" in node:
        properties = {name: _structural(value, definitions) for name, value in node["properties"].items()}
        rest = {key: _structural(value, definitions) for key, value in node.items() if key != "properties"}
        return {**rest, "properties": properties}
    return {key: _structural(value, definitions) for key, value in node.items()}
