"""The text of calls with JSON arguments, and the grammar of answers that must have them."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..grammar.schema import json_rule

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT = r"/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around the names and arguments of calls."""

    before_name: str
    before_arguments: str
    after_arguments: str
    opens: str = ""  # before the first call
    closes: str = ""  # after the last one
    separator: str | None = None  # between calls; None = an answer has one call at most

    @property
    def trigger(self) -> str | None:
        """The text that begins calls, and no other text; None if there is none."""
        begins = self.opens + self.before_name
        mark = re.match(r"<[^<>\n]+>|\[[A-Z_]+\]", begins)
        return None if mark is None else mark[0]


# For models without a known format, and for formats without JSON.
PLAIN_CALLS = CallFormat(
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    opens="[",
    closes="]",
    separator=", ",
)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around reasoning."""

    opens: str
    closes: str
    after: str = ""  # before the rest of the answer; white space is allowed in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Makes the grammar of an answer with calls, in the syntax of llguidance."""

    calls: CallFormat
    functions: Mapping[str, Mapping[str, Any]]  # the schema of the arguments, by name
    is_parallel: bool  # several calls in one answer
    reasoning: ReasoningMarks | None = None  # that may come before
    is_reasoning: bool = False  # the prompt has opened it already
    opens_content: str = ""  # before content without calls
    mark_ids: Mapping[str, int]  # tokens that no free text matches, by their texts

    def forced(self) -> str:
        """The grammar of an answer that is calls alone."""
        return self._grammar("calls")

    def optional(self) -> str:
        """The grammar of an answer that is text, or text with calls after it.

        Without a ``trigger``, text does not begin as calls do; with ``opens_content``, no text
        comes before calls.
        """
        if self.opens_content:
            return self.instead_of("ANY")
        trigger = self.calls.trigger
        if trigger is None:
            first = re.escape((self.calls.opens + self.calls.before_name)[:1])
            return self._grammar("(calls | TEXT)", [rf"TEXT: /(?s:[^{first}\s].*)?/"])
        if trigger in self.mark_ids:
            rules = [f"lead: ANY {self._terminal(trigger)}"]
        else:
            rules = [f"lead[lazy]: ANY {json.dumps(trigger)}"]
        rules.append(f"tail: {self._sequence(trigger_is_written=True)}")
        return self._grammar("(lead tail | ANY)", rules)

    def instead_of(self, content: str) -> str:
        """The grammar of an answer that is ``content``, a rule, or calls; with a ``trigger``."""
        assert self.calls.trigger is not None, "the beginnings of both must differ"
        return self._grammar("(calls | plain)", [self._plain(content)])

    def without_calls(self, content: str) -> str:
        """The grammar of an answer that is ``content``, a rule."""
        return self._grammar("plain", [self._plain(content)])

    def _plain(self, content: str) -> str:
        return f"plain: {self._text(self.opens_content)} ({content})"

    def _grammar(self, answer: str, rules: Iterable[str] = ()) -> str:
        lines = ["%llguidance {}", f"start: {self._lead()} {answer}", *self._reasoning_rules()]
        lines += [*rules, f"ANY: {_TEXT}"]
        if not self.functions:
            return "\n".join(lines) + "\n"
        lines.append(f"calls: {self._sequence()}")
        for index, (name, schema) in enumerate(self.functions.items()):
            head = json.dumps(name)[1:-1] + self.calls.before_arguments
            lines.append(
                f"call_{index}: {self._text(head)} {json_rule(schema)} "
                f"{self._text(self.calls.after_arguments)}"
            )
        one_of = " | ".join(f"call_{index}" for index in range(len(self.functions)))
        lines.append(f"call: {one_of}")
        return "\n".join(lines) + "\n"

    def _sequence(self, *, trigger_is_written: bool = False) -> str:
        calls = self.calls
        begins = calls.opens + calls.before_name
        if trigger_is_written:
            begins = begins.removeprefix(calls.trigger or "")
        more = ""
        if self.is_parallel and calls.separator is not None:
            more = f"({self._text(calls.separator + calls.before_name)} call)*"
        return f"{self._text(begins)} call {more} {self._text(calls.closes)}"

    def _lead(self) -> str:
        if self.reasoning is None:
            return ""
        return "thoughts" if self.is_reasoning else "(opens thoughts)?"

    def _reasoning_rules(self) -> list[str]:
        if self.reasoning is None:
            return []
        closes, after = self.reasoning.closes, f"SPACE {self._text(self.reasoning.after)}"
        if closes in self.mark_ids:
            thoughts = f"thoughts: ANY {self._terminal(closes)} {after}"
        else:
            thoughts = f"thoughts: thought {after}\nthought[lazy]: ANY {json.dumps(closes)}"
        return [f"opens: {self._text(self.reasoning.opens)}", thoughts, r"SPACE: /[ \n]{0,2}/"]

    def _text(self, text: str) -> str:
        """Return the rule of a text, in which such tokens are ids."""
        names = [name for name in self.mark_ids if name in text]
        if not names:
            return json.dumps(text, ensure_ascii=False) if text else '""'
        longest_first = sorted(names, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        return " ".join(
            self._terminal(piece) if piece in self.mark_ids else json.dumps(piece)
            for piece in pieces
            if piece
        )

    def _terminal(self, name: str) -> str:
        return f"<[{self.mark_ids[name]}]>"


def arguments_schema(parameters: object) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    if not parameters:
        return dict(_NO_ARGUMENTS)
    assert isinstance(parameters, dict)
    return {"type": "object", **parameters}
