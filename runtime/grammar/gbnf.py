"""Grammars in llama.cpp's GBNF, as Lark of llguidance that allows just the same texts. Pure."""

import re
from collections.abc import Mapping

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
    return "\n".join(
        f"{names[name]}: {_lark(rule.alternatives, names)}" for name, rule in rules.items()
    )


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
