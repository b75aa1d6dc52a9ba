"""OpenAI's own schemas for what our HTTP front answers; see `tests/data/openai_openapi/SOURCE.md`."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PATH = Path(__file__).parents[1] / "data" / "openai_openapi" / "openai_schemas_subset.json.gz"


def check(schema: str, value: Any) -> None:
    """Raises `jsonschema.ValidationError` unless `value` is a `schema`."""
    _validator(schema).validate(value)


def check_completion_chunk(value: Any) -> None:
    """The chunks of a completions stream: a whole answer's schema, with what OpenAI sends as null before the end."""
    _validator("CreateCompletionChunk").validate(value)


@functools.cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(_document() | {"$ref": f"#/components/schemas/{schema}"})


@functools.cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    schemas = document["components"]["schemas"]
    chunk = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    chunk["properties"]["choices"]["items"]["properties"]["finish_reason"]["nullable"] = True
    chunk["properties"]["usage"]["nullable"] = True
    schemas["CreateCompletionChunk"] = chunk
    converted: dict[str, Any] = _without_nullable(document)
    return converted


def _without_nullable(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_nullable(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    plain = {name: _without_nullable(value) for name, value in node.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain
