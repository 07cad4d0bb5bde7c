"""Grammars of structured output: from a request's schema, regex or grammar to llguidance's text.

Pure, and quick but for hostile texts: ``process.py`` tries each text first, where it can be killed.
A keyword that llguidance does not know is refused with its name, never ignored.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from ..errors import RequestError
from ..sampling import StructuredOutput
from .schema import json_rule
from .tags import TRIGGER_IDS

_MAX_DEPTH = 64  # of a schema
_MAX_SHOWN_CHARS = 300  # of llguidance's message
# Text without a choice would otherwise be tokenized, and a special token in it is then refused.
_NO_FORCING = '%llguidance {"no_forcing": true}'
_ANY_TEXT = r"/(.|\n)*/"
_LARK_START = re.compile(r"(?m)^\s*(%llguidance\b|start\s*(\[[^\]]*\]\s*)?:(?!:=))")
_PICTURE = re.compile(r"\n +\d+ \|")
_PLACE_OF_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*?)\]")
# Parts of llguidance's messages that do not name the keyword of the schema.
_KEYWORDS: Mapping[str, str] = {
    "oneOf constraints": "oneOf with schemas that one value may match",
    "not present in a registry": "$ref to another document",
    "Unknown format": "the keyword format",
    "min/maxProperties": "minProperties or maxProperties beside optional properties",
    "Unable to determine if regex is empty": "pattern beside minLength, maxLength or format",
}


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|.", re.DOTALL)
_IN_BRACKETS = {r"\[": "[", r"\]": "]"}  # escapes that Lark's strings do not have
_FIRST_LITERAL = 0x80  # code points from here on need no escape in Lark


def lark_of(text: str) -> str:
    r"""Return the grammar ``text`` in Lark. Raises ``ValueError``, or ``Exception`` of the parser.

    llguidance reads a text as the longest possible tokens of the grammar. Here each is one
    character, so that nothing is lost where two could begin alike: Lark's terminals would not let
    ``[ \n]* "\n"`` end.
    """
    plain = _ESCAPE.sub(_unescaped, text.replace("\r\n", "\n"))
    rules = GrammarParser().parse(plain)
    if "root" not in rules:
        raise ValueError("there is no rule root")
    names = {name: f"rule_{number}" for number, name in enumerate(rules)} | {"root": "start"}
    return "\n".join(f"{names[name]}: {_lark(rule.alternatives, names)}" for name, rule in rules.items())


def _lark(node: ASTNode, names: Mapping[str, str]) -> str:
    """Return an expression that stands alone. ``names``: of the rules in Lark."""
    match node:
        case LiteralNode(text):
            characters = _CHARACTER.findall(text)
            return f"({' '.join(map(_quoted, characters))})" if characters else '""'
        case RuleRefNode(name):
            if name not in names:
                raise ValueError(f"there is no rule {name}")
            return names[name]
        case RepetitionNode(repeated, low, high):
            most = "" if high is None else high
            return f"({_lark(repeated, names)}){{{low},{most}}}"
        case SequenceNode(parts):
            return " ".join(_lark(part, names) for part in parts) or '""'
        case AlternativeNode(parts):
            return f"({' | '.join(_lark(part, names) for part in parts)})"
        case RegexNode("."):
            return r"/(.|\n)/"
    return str(node)  # characters in brackets


def _quoted(character: str) -> str:
    return f'"{_IN_BRACKETS.get(character, character)}"'


def _unescaped(found: re.Match[str]) -> str:
    """Return an escaped character itself, unless it may mean something else in Lark."""
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    return chr(code) if code >= _FIRST_LITERAL else f"\\x{code:02x}"


def parser_limits() -> LLParserLimits:
    """Return the limits on the work of a grammar, for its trial and for each matcher."""
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,  # about 7 ms of one mask
        step_max_items=25_000,
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def compile_grammar(structured: StructuredOutput) -> str:
    """Return the grammar of ``structured`` for ``LLMatcher``. Raises ``RequestError``.

    Only ``check_structure`` finds all errors.
    """
    lark = _COMPILERS[structured.kind](structured.text, structured.field)
    return f"{lark}\n{_NO_FORCING}"


def check_structure(structured: StructuredOutput, tokenizer: LLTokenizer) -> None:
    """Raise ``RequestError`` for what cannot be served; the message names the keyword.

    Takes long for hostile texts, and may crash.
    """
    grammar = compile_grammar(structured)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=parser_limits())
    for message in messages:
        unknown = _UNKNOWN_KEYWORDS.search(message)
        if unknown is not None:
            raise _refused(structured.field, f"the schema has the keywords {unknown[1]}")
    if is_error:
        raise _refused(structured.field, _explained(messages[0]))
    start_matcher(structured, tokenizer)


def start_matcher(structured: StructuredOutput, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of an answer, with its first mask computed.

    Raises ``RequestError``.
    """
    grammar = compile_grammar(structured)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _refused(structured.field, _explained(matcher.get_error()))
    return matcher


def start_forcing(structured: StructuredOutput, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of an answer, without a mask.

    Masks renew limits. Without them, all searches for forced text together have the fuel that a
    grammar has before the first mask.
    """
    return LLMatcher(tokenizer, compile_grammar(structured), log_level=0, limits=parser_limits())


def _explained(message: str) -> str:
    """Return llguidance's message on one line, with the keyword that it is about."""
    # The list of all special tokens, and a picture of the place, are too long.
    text = _PICTURE.split(message.partition("; following special tokens")[0])[0]
    text = " ".join(_PLACE_OF_SCHEMA.sub("", text).split())
    if len(text) > _MAX_SHOWN_CHARS:
        text = text[:_MAX_SHOWN_CHARS] + "…"
    found = [keyword for part, keyword in _KEYWORDS.items() if part in message]
    return f"{found[0]}: {text}" if found else text


def _refused(field: str, reason: str) -> RequestError:
    return RequestError(f"{field} cannot be served: {reason}", param=field)


def _json_schema(text: str, field: str) -> str:
    schema = _read_json(text, field)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused(field, "the schema is not an object")
    return f"start: {json_rule(schema)}"


def _json_object(text: str, field: str) -> str:
    """Any object; ``text`` is not used."""
    return _json_schema('{"type": "object"}', field)


def _regex(text: str, field: str) -> str:
    """The whole answer matches; ``^`` at the start and ``$`` at the end change nothing."""
    text = text.removeprefix("^")
    if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1:
        text = text[:-1]
    made: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return made


def _choice(text: str, field: str) -> str:
    choices = _read_json(text, field)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise _refused(field, "choices are a list of strings, at least one")
    return f"start: {' | '.join(map(_literal, choices))}"


def _grammar(text: str, field: str) -> str:
    """Lark of llguidance, or GBNF of llama.cpp."""
    if _LARK_START.search(text) is None:
        try:
            text = lark_of(text)
        except Exception as error:  # of any type, as it finds mistakes by chance
            what = str(error) or type(error).__name__
            raise _refused(field, f"it is neither Lark with start: nor GBNF: {what}") from None
    return text


def _structural_tag(text: str, field: str) -> str:
    """Free text with tags, each of which begins, has JSON of a schema, and ends.

    The text is an object with ``structures`` (each ``begin``, ``schema`` and ``end``) and
    ``triggers``, at each of which a structure begins. ``trigger_ids``: see ``tags.py``.
    """
    tag = _read_json(text, field)
    structures = _list_of(dict, tag, "structures", field)
    triggers = _list_of(str, tag, "triggers", field)
    ids = tag.get(TRIGGER_IDS, {})
    if not (isinstance(ids, dict) and all(type(one) is int for one in ids.values())):
        raise _refused(field, f"{TRIGGER_IDS} is not an object with ids")
    rules = []
    for number, structure in enumerate(structures):
        begin, end = structure.get("begin"), structure.get("end", "")
        schema = structure.get("schema")
        is_schema = isinstance(schema, dict) or schema is True
        if not (isinstance(begin, str) and isinstance(end, str) and is_schema):
            raise _refused(field, f"structures[{number}] needs begin, schema and end")
        trigger = next((one for one in triggers if one and begin.startswith(one)), None)
        if trigger is None:
            raise _refused(field, f"structures[{number}] begins with none of the triggers")
        inline = json_rule({} if schema is True else schema)
        rest = f"{_literal(begin[len(trigger) :])} {inline} {_literal(end)}"
        token = f" | TEXT <[{ids[trigger]}]>" if trigger in ids else ""
        rules.append(
            f"trigger_{number}[lazy]: TEXT {_literal(trigger)}\n"
            f"tag_{number}: (trigger_{number}{token}) {rest}"
        )
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return f"start: ({tags})* last\nlast: TEXT\nTEXT: {_ANY_TEXT}\n" + "\n".join(rules)


def _list_of(kind: type, tag: Any, name: str, field: str) -> list[Any]:
    """Return the list ``name`` of a structural tag. Raises ``RequestError``."""
    value = tag.get(name) if isinstance(tag, dict) else None
    if isinstance(value, list) and value and all(isinstance(one, kind) for one in value):
        return value
    raise _refused(field, f"a structural tag is an object with a list of {name}")


def _literal(text: str) -> str:
    """Return a string of Lark."""
    return json.dumps(text)


def _read_json(text: str, field: str) -> Any:
    """Return the value. Raises ``RequestError`` unless it is JSON, and not too deep."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _refused(field, f"it is not valid JSON: {error}") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for one in level for item in _items(one)]
        if not level:
            return value
    raise _refused(field, f"it is more than {_MAX_DEPTH} objects and arrays deep")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


_COMPILERS: Mapping[str, Callable[[str, str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
