"""What a request says about the form of its answer, in any of the ways clients say it, as StructuredOutputsParams.

`response_format` (OpenAI's), `structured_outputs` (vLLM's) and the older `guided_*` fields; one of them per request.
Must not know: how a constraint is checked (grammar/request.py) or enforced.
"""

from __future__ import annotations

from typing import Any

from quire.schema.errors import InputError
from quire.schema.params import StructuredOutputsParams
from quire.server.openai.protocol import GenerateRequest, ResponseFormat

GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object", "structural_tag": "structural_tag",
}  # fmt: skip
GUIDED_WHITESPACE = "guided_whitespace_pattern"
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_FIELDS = StructuredOutputsParams.__struct_fields__
_HIDDEN = ("_backend", "_backend_was_auto")  # other servers' own notes, which their clients may send back


def constraint_of(request: GenerateRequest) -> StructuredOutputsParams | None:
    by_field: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and request.response_format.type != "text":
        by_field["response_format"] = _of_format(request.response_format)
    if request.structured_outputs:
        by_field["structured_outputs"] = _of_params(request.structured_outputs)
    if request.model_extra:
        by_field |= _of_guided(request.model_extra)
    if not by_field:
        return None
    if len(by_field) > 1:
        raise InputError(
            f"only one of {' and '.join(by_field)} can be given: each says what the answer looks like",
            param=list(by_field)[1],
        )
    ((name, fields),) = by_field.items()
    try:
        return StructuredOutputsParams(**fields)
    except InputError as wrong:
        raise InputError(str(wrong), param=name) from None


def form_name(request: GenerateRequest) -> str:
    """The field in which the client said it, for refusals."""
    if request.response_format is not None and request.response_format.type != "text":
        return "response_format"
    if request.structured_outputs:
        return "structured_outputs"
    extra = request.model_extra or {}
    return next((name for name in GUIDED if extra.get(name)), "tools")


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    further = form.model_extra or {}
    if form.type == "json_object":
        return {"json_object": True}
    if form.type == "json_schema":
        described = further.get("json_schema")
        if not isinstance(described, dict):
            raise _wrong("response_format of type json_schema needs 'json_schema': an object with 'name' and 'schema'")
        schema = described.get("schema")
        if schema is None:
            return {"json_object": True}
        if not isinstance(schema, dict | bool):
            raise _wrong(f"response_format.json_schema.schema must be an object, got {type(schema).__name__}")
        return {"json": schema}
    if form.type == "structural_tag":
        return {"structural_tag": {key: value for key, value in further.items() if value is not None}}
    raise _wrong(f"response_format.type is {form.type!r:.100}; it must be one of {', '.join(_FORMATS)}")


def _of_params(fields: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in fields if name not in _FIELDS and name not in _HIDDEN]
    if unknown:
        raise InputError(
            f"structured_outputs has no field {unknown[0]!r:.100}; it has {', '.join(_FIELDS)}",
            param="structured_outputs",
        )
    return {name: value for name, value in fields.items() if value is not None and name not in _HIDDEN}


def _of_guided(extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    by_name = {old: {new: extra[old]} for old, new in GUIDED.items() if extra.get(old)}
    pattern = extra.get(GUIDED_WHITESPACE)
    for fields in by_name.values():
        if pattern is not None:
            fields["whitespace_pattern"] = pattern
    return by_name


def _wrong(message: str) -> InputError:
    return InputError(message, param="response_format")
