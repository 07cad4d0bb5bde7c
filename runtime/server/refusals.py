"""Fields of OpenAI's API and of its relatives that corun does not serve.

A field is refused by name unless its value asks for nothing. It is never ignored: a client that
asked for a tool call must not get prose that looks like an answer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import NotServedError


@dataclass(frozen=True, slots=True)
class _NotServed:
    """Why a field is refused, and the values (besides null) that ask for nothing."""

    reason: str
    neutral: tuple[object, ...] = ()


_NO_TOOLS = "calling tools and functions is not served"
_NO_SOUND = "only text is served"
_NO_CONSTRAINTS = "constrained decoding is not served"
_NO_STORE = "completions are not stored"
_NO_REASONING = "the effort of a model cannot be set"

NOT_SERVED: Mapping[str, _NotServed] = {
    "tools": _NotServed(_NO_TOOLS, ([],)),
    "tool_choice": _NotServed(_NO_TOOLS, ("none",)),
    "parallel_tool_calls": _NotServed(_NO_TOOLS, (True, False)),
    "functions": _NotServed(_NO_TOOLS, ([],)),
    "function_call": _NotServed(_NO_TOOLS, ("none",)),
    "response_format": _NotServed(_NO_CONSTRAINTS, ({"type": "text"},)),
    "structured_outputs": _NotServed(_NO_CONSTRAINTS),
    "guided_json": _NotServed(_NO_CONSTRAINTS),
    "guided_regex": _NotServed(_NO_CONSTRAINTS),
    "guided_choice": _NotServed(_NO_CONSTRAINTS),
    "guided_grammar": _NotServed(_NO_CONSTRAINTS),
    "best_of": _NotServed("all choices are returned, none are ranked", (1,)),
    "use_beam_search": _NotServed("beam search is not served", (False,)),
    "suffix": _NotServed("filling in the middle is not served", ("",)),
    "logit_bias": _NotServed("biasing single tokens is not served", ({},)),
    "prompt_logprobs": _NotServed("log-probabilities of the prompt are not served"),
    "audio": _NotServed(_NO_SOUND),
    "modalities": _NotServed(_NO_SOUND, (["text"],)),
    "prediction": _NotServed("predicted outputs are not served"),
    "reasoning_effort": _NotServed(_NO_REASONING),
    "verbosity": _NotServed(_NO_REASONING),
    "web_search_options": _NotServed("searching the web is not served"),
    "store": _NotServed(_NO_STORE, (False,)),
    "metadata": _NotServed(_NO_STORE, ({},)),
    "service_tier": _NotServed("there is one tier of service", ("auto", "default")),
    "chat_template": _NotServed("templates come with the model or with --chat-template"),
    "priority": _NotServed("requests have no priorities", (0,)),
}


def refuse_not_served(data: dict[str, Any], served: Collection[str]) -> None:
    """Remove known fields that ask for nothing from ``data``; raise for the others.

    Raises ``NotServedError`` naming the first field that asks for something.
    """
    for name in [name for name in data if name in NOT_SERVED and name not in served]:
        entry = NOT_SERVED[name]
        if data[name] is not None and not _is_neutral(data[name], entry.neutral):
            raise NotServedError(
                f"{name} is not served: {entry.reason}{_allowed(entry.neutral)}", param=name
            )
        del data[name]


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Compare with the type, so that true does not pass for 1."""
    return any(type(value) is type(other) and value == other for other in neutral)


def _allowed(neutral: tuple[object, ...]) -> str:
    shown = [repr(value).replace("'", '"') for value in neutral if not isinstance(value, bool)]
    return f" (only {' or '.join(shown)} is accepted)" if shown else ""
