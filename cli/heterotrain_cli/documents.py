"""Reading YAML and JSON documents, and checking them against pydantic models.

YAML is read with the numbers of YAML 1.2: PyYAML's default reads ``1e-3`` as a string and ``010`` as eight. A repeated
key is refused instead of silently dropped. Every mistake becomes one sentence with its place and the remedy.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import yaml
from heterotrain_operator.api.explain import explain
from heterotrain_operator.api.text import quoted
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict, ValidationError
from pydantic.alias_generators import to_camel

from heterotrain_cli.errors import InputError

STANDARD_INPUT = "-"
_REPEATED = "the key "
"""First words of the message for a key that appears twice."""


def _integral(value: Any) -> Any:
    """Return 64.0 as 64, as JSON schema understands integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Text = Annotated[str, Strict()]
Name = Annotated[Text, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict(), BeforeValidator(_integral)]
Number = Annotated[float, Strict()]
Seconds = Annotated[Number, Field(ge=0, le=1e9)]
Price = Annotated[Number, Field(ge=0, le=1e9)]
Fraction = Annotated[Number, Field(ge=0, le=1)]


def _alias(field: str) -> str:
    """Return a field's name in documents: camelCase, with ``Seconds`` for ``_s``."""
    return to_camel(re.sub(r"_s$", "_seconds", field))


class DocumentPart(BaseModel):
    """Base of all parts of a document: no unknown fields, finite numbers, values of the right type only."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False, use_attribute_docstrings=True,
        alias_generator=_alias,
        field_title_generator=lambda name, field: field.alias or _alias(name),
    )  # fmt: skip


def schema_config(name: str) -> ConfigDict:
    """Return the configuration of a whole document: its title and the identity of its JSON schema."""
    identity: dict[str, JsonValue] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:heterotrain:schema:{name}:v1",
    }
    return ConfigDict(title=f"heterotrain {name}", json_schema_extra=identity)


class Document(DocumentPart):
    """Base of whole documents."""

    schema_url: Text = Field(default="", alias="$schema")
    """Where an editor finds this schema; otherwise unused."""
    description: Text = ""
    """One sentence for people, shown by ``python -m heterotrain_simulate --list``."""


AnyDocument = TypeVar("AnyDocument", bound=BaseModel)


class Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2's core numbers and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: D102, FBT001, FBT002  # PyYAML's own method
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, _repeated(key), key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def _int(loader: Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


Loader.add_constructor("tag:yaml.org,2002:int", _int)


def _repeated(key: object) -> str:
    return f"{_REPEATED}{quoted(str(key))} appears twice: keep one"


def place(path: str) -> str:
    """Return the name of the document in messages."""
    return "standard input" if path == STANDARD_INPUT else path


def read_text(path: str) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        InputError: the file can't be read.
    """
    try:
        return sys.stdin.read() if path == STANDARD_INPUT else Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{place(path)}: there is no such file: check the path") from error
    except IsADirectoryError as error:
        raise InputError(f"{place(path)}: is a folder: name a file in it") from error
    except OSError as error:
        raise InputError(f"{place(path)}: cannot be read ({error.strerror}): check its permissions") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{place(path)}: is not UTF-8 text: write it as YAML or JSON") from error


def read_document(path: str, model: type[AnyDocument]) -> AnyDocument:
    """Return a YAML or JSON file as the model; ``-`` is standard input.

    Raises:
        InputError: the file can't be read, is neither YAML nor JSON, or does not fit the model.
    """
    where = place(path)
    return check_document(parse_document(read_text(path), where=where), model, where=where)


def parse_document(text: str, *, where: str) -> Any:
    """Return the value of a YAML or JSON text with one document.

    Raises:
        InputError: the text is neither YAML nor JSON, or holds more than one document.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError:
            pass  # flow-style YAML also starts with a brace
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
    documents = parse_documents(text, where=where)
    if len(documents) > 1:
        raise InputError(f"{where}: holds {len(documents)} documents, but only 1 is allowed")
    return documents[0] if documents else None


def parse_documents(text: str, *, where: str) -> list[Any]:
    """Return the values of all documents in a YAML text.

    Raises:
        InputError: the text is neither YAML nor JSON.
    """
    try:
        return list(yaml.load_all(text, Loader=Loader))  # derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, str(error.problem)
        if problem.startswith(_REPEATED):
            line = f" (line {mark.line + 1})" if mark is not None else ""
            raise InputError(f"{where}: {problem}{line}") from error
        at = f"correct line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "correct it"
        raise InputError(f"{where}: is neither YAML nor JSON: {at} ({quoted(problem)})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = quoted(" ".join(str(error).split()))
        raise InputError(f"{where}: is neither YAML nor JSON: correct it ({said})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(_repeated(next(key for key in names if names.count(key) > 1)))
    return found


def check_document(document: Any, model: type[AnyDocument], *, where: str) -> AnyDocument:
    """Return the document as the model.

    Raises:
        InputError: it does not fit; the message has the place, the value and what is allowed.
    """
    if isinstance(document, Mapping) and {"apiVersion", "kind"} <= document.keys():
        raise InputError(f"{where}: is a Kubernetes {document['kind']}, but must be a {model.model_config['title']}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, model)}") from error


def schema_option(model: type[BaseModel]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--schema``, which prints the model's JSON schema."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001  # click's own signature
        if wanted:
            click.echo(json.dumps(model.model_json_schema(), indent=2, ensure_ascii=False))
            context.exit()

    return click.option(
        "--schema", is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Print the JSON schema of the file and exit.",
    )  # fmt: skip
