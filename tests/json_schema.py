"""The part of JSON Schema (draft 2020-12) that the package's schemas use, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
_NOTES = {"$schema", "title", "description"}
_KNOWN = {
    *("type", "const", "enum", "required", "properties", "additionalProperties", "items", "prefixItems"),
    *("minItems", "maxItems", "minimum", "exclusiveMinimum", "pattern"),
}


def violations(value: Any, schema: Mapping[str, Any], at: str = "$") -> Iterator[str]:
    """Where and how a value departs from a schema.

    Raises:
        NotImplementedError: the schema has a keyword that is not known here.

    """
    unknown = schema.keys() - _NOTES - _KNOWN
    if unknown:
        raise NotImplementedError(f"{at}: {sorted(unknown)}")
    if "const" in schema and value != schema["const"]:
        yield f"{at} is {value!r}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} is {value!r}, none of {schema['enum']}"
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{at} is {value!r}, no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from _of_object(value, schema, at)
    elif isinstance(value, list):
        yield from _of_array(value, schema, at)
    elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at} is {value!r}, which does not match"
    elif isinstance(value, int | float) and (
        value < schema.get("minimum", value) or value <= schema.get("exclusiveMinimum", value - 1)
    ):
        yield f"{at} is {value}, too small"


def _is_of(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _TYPES[name]) for name in names)


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    yield from (f"{at} lacks {name}" for name in schema.get("required", ()) if name not in value)
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name, entry in value.items():
        if name not in known and others is False:
            yield f"{at} has an unknown {name}"
        else:
            yield from violations(entry, known.get(name, others or {}), f"{at}.{name}")


def _of_array(value: list[Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{at} has {len(value)} items"
    first = schema.get("prefixItems", ())
    for i, entry in enumerate(value):
        yield from violations(entry, first[i] if i < len(first) else schema.get("items", {}), f"{at}[{i}]")
