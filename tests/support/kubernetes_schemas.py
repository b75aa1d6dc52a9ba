"""Whether an object is what Kubernetes, KubeRay or Prometheus's operator take: `tests/data/kubernetes_schemas`.

Strict: an API server drops fields that it does not know without a word, so here they are errors.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PATH = Path(__file__).parents[1] / "data" / "kubernetes_schemas" / "schemas.json.gz"


def check(value: Any) -> None:
    """Raises `jsonschema.ValidationError` unless the object is as its kind says, `KeyError` for a kind unknown here."""
    _validator(f"{value['apiVersion']}/{value['kind']}").validate(value)


@functools.cache
def _validator(kind: str) -> Draft202012Validator:
    document = _document()
    schema = _strict(document["kinds"][kind])
    if "properties" in schema:  # a CRD leaves these to the API server
        schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": _METADATA}
    return Draft202012Validator({"$defs": document["$defs"], **schema})


@functools.cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return document


_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 53},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def _strict(schema: Any) -> Any:
    """The schema of a CRD as JSON schema: closed wherever it names fields. Of the `metadata` of pod templates a CRD
    says only that it is an object."""
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {name: value if name == "properties" else _strict(value) for name, value in schema.items()}
    if "properties" in schema:
        strict["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    return strict
