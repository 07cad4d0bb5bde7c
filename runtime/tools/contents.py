"""What the text of a field means: JSON, tags or lines, and the shape that a template gives it."""

import json
from collections.abc import Mapping
from typing import Any

import regex

_TIMEOUT_S = 0.05  # of one pattern of a template
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_KEY_WITHOUT_QUOTES = regex.compile(r"([{,]\s*)(\w+)(\s*:)")

_PYTHON_VALUES = {"True": True, "False": False, "None": None}  # which models write, too
_JSON_TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
    str: "string",
}

CONTENT_KINDS = frozenset({"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"})


def value_of(text: str, kind: str, arguments: Mapping[str, Any]) -> Any:
    """Return the value of a field's ``text``. Raises ``ValueError``, for timeouts too."""
    shown = text.strip() if arguments.get("strip", True) else text
    match kind:
        case "json":
            return _json(text, arguments)
        case "xml-inline":
            return _tags(text, arguments)
        case "kv-lines":
            return _lines(text, arguments)
        case "int":
            return int(shown)
        case "float":
            return float(shown)
        case "bool":
            return shown.lower() in ("true", "1")
        case _:
            return shown


def _json(text: str, arguments: Mapping[str, Any]) -> Any:
    """Read JSON in which keys may lack quotes and texts may have other marks around them."""
    pieces = [(text, False)]
    for opens, closes in arguments.get("string_delims", []):
        pieces = [piece for one in pieces for piece in _divided(*one, opens, closes)]
    if arguments.get("unquoted_keys", False):
        pieces = [
            (one if is_text else _KEY_WITHOUT_QUOTES.sub(r'\1"\2"\3', one), is_text)
            for one, is_text in pieces
        ]
    try:
        return json.loads("".join(json.dumps(one) if is_text else one for one, is_text in pieces))
    except (ValueError, RecursionError) as error:
        if arguments.get("allow_non_json"):
            return text.strip()
        raise ValueError(f"it is not JSON: {error}") from error


def _divided(text: str, is_text: bool, opens: str, closes: str) -> list[tuple[str, bool]]:
    """Return the parts of JSON between and within the marks of its texts."""
    if is_text:
        return [(text, True)]
    first, *rest = text.split(opens)
    pieces = [(first, False)]
    if opens == closes:  # every second part is a text
        return [(one, index % 2 == 1) for index, one in enumerate([first, *rest])]
    for one in rest:
        inside, mark, after = one.partition(closes)
        if not mark:
            raise ValueError("a text in it has no end")
        pieces += [(inside, True), (after, False)]
    return pieces


def _tags(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Read tags with a key and a value each."""
    found: dict[str, Any] = {}
    try:
        matches = list(regex.finditer(arguments["tag_pattern"], text, regex.DOTALL, timeout=_TIMEOUT_S))
    except (TimeoutError, KeyError, TypeError, regex.error) as error:
        raise ValueError(f"tag_pattern: {error!r}") from error
    for match in matches:
        groups = match.groupdict()
        key, value = groups.get("key"), _nested(groups.get("value") or "", arguments)
        if key is None:
            raise ValueError("tag_pattern has no group named key")
        if key in found and arguments.get("merge_duplicates"):
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        else:
            found[key] = value
    return found


def _lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, mark, value = line.strip().partition(arguments.get("kv_sep", ":"))
        if mark:
            found[key.strip()] = _nested(value.strip(), arguments)
    return found


def _nested(text: str, arguments: Mapping[str, Any]) -> Any:
    parser = arguments.get("value_parser")
    if parser is None:
        return text
    return value_of(text, parser.get("name", "text"), parser.get("args", {}))


def transformed(value: Any, transform: Any, captures: Mapping[str, str], *, each: bool) -> Any:
    """Return ``value`` in the shape of ``transform``. Raises ``ValueError``."""
    if transform is None:
        return value
    if not each:
        return _filled(transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("it is not a list of objects")
    return [_filled(transform, {**captures, **one}) for one in value]


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {key: _filled(one, scope) for key, one in transform.items()}
    if isinstance(transform, list):
        return [_filled(one, scope) for one in transform]
    path = placeholder(transform)
    if path is None:
        return transform
    value: Any = scope
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"it has no {'.'.join(path)}")
        value = value[key]
    return value


def placeholder(value: Any) -> tuple[str, ...] | None:
    """Return the path that ``value`` stands for in a transform; None if it is a plain value."""
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else tuple(found[1].split("."))


def check_transform(value: Any, where: str) -> None:
    """Raise ``ValueError`` for a text that mixes a placeholder with other text."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        check_transform(item, where)
    if isinstance(value, str) and _PLACEHOLDER.search(value) and placeholder(value) is None:
        raise ValueError(f"transform of {where} mixes a placeholder with text: {value!r:.80}")


def cast_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that were written as text with the types of a function's ``parameters``."""
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    return {
        name: _cast(value, _types(properties.get(name))) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _types(schema: Any) -> list[object]:
    if not isinstance(schema, dict):
        return []
    stated = schema.get("type")
    types: list[object] = list(stated) if isinstance(stated, list) else [stated]
    for union in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(union, list):
            types += [name for one in union for name in _types(one)]
    return [name for name in types if name is not None]


def _cast(text: str, types: list[object]) -> Any:
    """Return the value that ``text`` is in JSON, if its type is one of ``types``; else the text."""
    if "string" in types or not types:
        return text
    written = text.strip()
    try:
        value = _PYTHON_VALUES[written] if written in _PYTHON_VALUES else json.loads(written)
    except (ValueError, RecursionError):
        return text
    kind = _JSON_TYPES[type(value)]
    is_whole = kind == "integer" and "number" in types
    return value if kind in types or is_whole else text
