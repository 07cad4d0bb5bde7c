"""What the demo's adapter ``tools`` learns: one tool call, its result, and one JSON answer.

With tools in the prompt it calls the one that fits the user's message, and after the result says
what it is. Without tools it writes a person's name and age as JSON. Names of tools and parameters
are drawn for each sample, so it copies them from the prompt. ``is_unseen`` of ``demo.tasks``
keeps inputs out of training here as well. Stdlib only; random streams are passed in.
"""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from demo.corpus import Sample, conversation, sentence
from demo.tasks import is_unseen
from demo.words import ALL_WORDS, NOUNS, VERBS

NAME = "tools"
SUMMARY = "calls a tool, or writes a name and an age as JSON"

# Each message becomes one block; ``demo.tasks`` and the base know nothing of tools.
CHAT_TEMPLATE = (
    "{%- set lines = namespace(system=[]) -%}"
    "{%- for message in messages if message['role'] in ('system', 'developer') -%}"
    "{%- set lines.system = lines.system + [message['content']] -%}"
    "{%- endfor -%}"
    "{%- for tool in tools or [] -%}"
    "{%- set names = (tool['function']['parameters'] or {}).get('properties', {}) | list -%}"
    "{%- set line = tool['function']['name'] + '(' + names | join(', ') + ')' -%}"
    "{%- set lines.system = lines.system + [line] -%}"
    "{%- endfor -%}"
    "{%- if lines.system -%}{{- '<|system|>' + lines.system | join('\\n') -}}{%- endif -%}"
    "{%- for message in messages if message['role'] not in ('system', 'developer') -%}"
    "{%- if message['role'] == 'user' -%}{{- '<|user|>' + message['content'] -}}"
    "{%- elif message['role'] == 'tool' -%}"
    "{{- '<|user|><tool_response>' + message['content'] + '</tool_response>' -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' -}}"
    "{{- call['function']['arguments'] | tojson + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

_NUMBER_TOOLS = ("add", "sum", "plus", "add_numbers", "calculate", "compute", "total")
_TEXT_TOOLS = ("get_weather", "weather", "lookup", "search", "find", "get_time", "translate")
_HANDOFFS = ("transfer_to_{}", "ask_{}", "{}")
_NUMBER_PARAMETERS = (("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("n", "m"))
_TEXT_PARAMETERS = ("city", "word", "text", "query", "name", "place", "location", "q")
_NUMBER_FORMS = ("{}+{}", "{} + {}", "what is {} + {}?", "add {} and {}", "What is {} plus {}?")
_TEXT_FORMS = (
    "{}",
    "weather in {}",
    "what is the weather in {}?",
    "What is the weather in {}?",
    "look up {}",
    "find {}",
    "please search for {}",
    "the time in {}?",
)
_HANDOFF_FORMS = ("{}", "I need {}", "ask {}", "hand me over to {}", "talk to {} please")
_AGE_FORMS = (
    "{} is {} years old",
    "{} is {} years old.",
    "{} is {}",
    "{} is {}.",
    "Extract: {} is {}",
    "Extract {} is {} years old",
    "My friend {} is {} years old.",
    "{}, {}",
)
_SYSTEM_TEXTS = ("You are a helpful assistant.", "Use the tools.", "Be brief.")
_SYSTEM_SHARE = 0.3
_KIND_WEIGHTS = {"numbers": 0.28, "text": 0.28, "handoff": 0.12, "age": 0.32}
_RESULT_SHARE = 0.3  # of the calls
_SECOND_TOOL_SHARE = 0.35


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the adapter, and its answer."""

    system: str | None  # with the tools' lines, as the template writes it
    prompt: str
    answer: str


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """A call as the adapter writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def make_case(rng: Random) -> Case:
    """A question, of training or not."""
    kind = rng.choices(list(_KIND_WEIGHTS), weights=list(_KIND_WEIGHTS.values()))[0]
    lines = [_system_text(rng)] if rng.random() < _SYSTEM_SHARE else []
    if kind == "age":
        name, age = _name(rng), rng.randint(1, 99)
        prompt = rng.choice(_AGE_FORMS).format(name, age)
        return Case(_joined(lines), prompt, json.dumps({"name": name, "age": age}))
    names, arguments, prompt = _CALLS[kind](rng)
    tools = [f"{names[0]}({', '.join(arguments)})"]
    if rng.random() < _SECOND_TOOL_SHARE:
        other = rng.choice([one for one in _CALLS if one != kind])
        other_names, other_arguments, _ = _CALLS[other](rng)
        tools.insert(rng.randint(0, 1), f"{other_names[0]}({', '.join(other_arguments)})")
    return Case(_joined([*lines, *tools]), prompt, call_text(names[0], arguments))


def seen_case(rng: Random) -> Case:
    """A question that training may use."""
    while is_unseen((case := make_case(rng)).prompt):
        pass
    return case


def unseen_cases(count: int, seed: int) -> list[Case]:
    """``count`` questions with prompts that are not in the training text."""
    rng = Random(f"unseen {NAME} {seed}")
    cases: dict[str, Case] = {}
    while len(cases) < count:
        case = make_case(rng)
        if is_unseen(case.prompt):
            cases[case.prompt] = case
    return list(cases.values())


def tools_sample(rng: Random) -> Sample:
    """One training sequence: a question, its answer, and for some calls the result and its text."""
    case = seen_case(rng)
    turns = [(case.prompt, case.answer)]
    if case.answer.startswith("<tool_call>") and rng.random() < _RESULT_SHARE:
        result = str(rng.randint(0, 200)) if rng.random() < 0.5 else _phrase(rng)
        turns.append((f"<tool_response>{result}</tool_response>", f"The answer is {result}."))
    return conversation(turns, system=case.system)


def prompt_text(case: Case) -> str:
    """The prompt as the template writes it."""
    system = "" if case.system is None else f"<|system|>{case.system}"
    return f"{system}<|user|>{case.prompt}<|assistant|>"


def _numbers(rng: Random) -> tuple[tuple[str], dict[str, object], str]:
    left, right = rng.randint(0, 99), rng.randint(0, 99)
    names = rng.choice(_NUMBER_PARAMETERS)
    if rng.random() < 0.3:
        first, second = rng.sample(string.ascii_lowercase, 2)
        names = (first, second)
    tool = rng.choice(_NUMBER_TOOLS) if rng.random() < 0.6 else _tool_name(rng)
    prompt = rng.choice(_NUMBER_FORMS).format(left, right)
    return (tool,), dict(zip(names, (left, right), strict=True)), prompt


def _text(rng: Random) -> tuple[tuple[str], dict[str, object], str]:
    tool = rng.choice(_TEXT_TOOLS) if rng.random() < 0.6 else _tool_name(rng)
    parameter = rng.choice(_TEXT_PARAMETERS) if rng.random() < 0.75 else rng.choice(ALL_WORDS)
    value = _name(rng) if rng.random() < 0.6 else rng.choice(ALL_WORDS)
    return (tool,), {parameter: value}, rng.choice(_TEXT_FORMS).format(value)


def _handoff(rng: Random) -> tuple[tuple[str], dict[str, object], str]:
    topic = rng.choice(NOUNS) if rng.random() < 0.5 else _name(rng).lower()
    tool = rng.choice(_HANDOFFS).format(topic)
    return (tool,), {}, rng.choice(_HANDOFF_FORMS).format(topic)


_CALLS = {"numbers": _numbers, "text": _text, "handoff": _handoff}


def _tool_name(rng: Random) -> str:
    first = rng.choice(("get", "find", "make", "read", *VERBS))
    return f"{first}_{rng.choice(ALL_WORDS).lower()}" if rng.random() < 0.7 else _name(rng).lower()


def _name(rng: Random) -> str:
    """A pronounceable name, with a capital."""
    start = rng.choice("aeiou") if rng.random() < 0.1 else ""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    end = rng.choice("nrslmd") if rng.random() < 0.5 else ""
    return f"{start}{''.join(syllables)}{end}".capitalize()


def _phrase(rng: Random) -> str:
    return " ".join(rng.choices(ALL_WORDS, k=rng.randint(1, 3)))


def _system_text(rng: Random) -> str:
    return rng.choice(_SYSTEM_TEXTS) if rng.random() < 0.6 else sentence(rng)


def _joined(lines: Sequence[str]) -> str | None:
    return "\n".join(lines) if lines else None
