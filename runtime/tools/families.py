"""Response templates of model families that have none in their tokenizers.

A family is recognised by the marks in its chat template, as fine-tuned models keep them under
other names. The formats are those of the models' cards.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .call_format import PLAIN_CALLS, CallFormat, ReasoningMarks
from .parser import CALLS_FIELD, REASONING_FIELDS, ParserOptions, TemplateParser, keys_of
from .parts import parsed
from .response_template import ResponseTemplate, TemplateField, template_of

# The ends of generation prompts. The last one in a prompt begins the answer.
_ASSISTANT = [
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|start|>assistant",
    "<|turn>model\n",
    "<tool_response|>",
    "<start_of_turn>model\n",
    "<|assistant|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<\uff5cAssistant\uff5c>",
    "[/INST]",
    "[/TOOL_RESULTS]",
]
_END_MARK = re.compile(r"<[^<>\s]+>")  # a token that may end an answer
_NAMED: Mapping[str, Any] = {"function": {"name": "{name}", "arguments": "{content}"}}
_EACH: Mapping[str, Any] = {"function": {"name": "{name}", "arguments": "{arguments}"}}
_NAME = r"(?P<name>[\w.:-]+)"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes answers."""

    template: ResponseTemplate
    calls: CallFormat | None = None  # None = no format that a grammar can describe
    reasoning: ReasoningMarks | None = None
    opens_content: str = ""  # before content without calls

    @property
    def has_calls(self) -> bool:
        return CALLS_FIELD in self.template.fields

    @property
    def has_reasoning(self) -> bool:
        return any(name in REASONING_FIELDS for name in self.template.fields)


@dataclass(frozen=True, slots=True)
class _Family:
    marks: tuple[str, ...]  # all are in its chat template
    calls: Mapping[str, Any]  # the field of calls
    format: CallFormat | None = None
    others: Mapping[str, Any] | None = None  # further fields
    reasoning: ReasoningMarks | None = None  # None = as its field says
    opens_content: str = ""


def _json_call(before: str, arguments: str, after: str, separator: str | None) -> CallFormat:
    return CallFormat(f'{before}{{"name": "', f'", "{arguments}": ', f"}}{after}", separator=separator)


# The first one with marks in the chat template counts.
_FAMILIES = (
    _Family(  # gpt-oss
        ("<|channel|>", "<|message|>", "<|start|>"),
        {
            "open_pattern": r"(?:<\|start\|>assistant)?(?:"
            rf"<\|channel\|>\w+ to=functions\.{_NAME}| to=functions\.{_NAME}<\|channel\|>\w+"
            r") ?(?:<\|constrain\|>)?\w*<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>",
            "content": "json",
            "transform": _NAMED,
        },
        CallFormat("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close": "<|end|>",
            },
            "final": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
                r"(?: ?<\|constrain\|>\w+)?<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
            },
        },
        ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        "<|channel|>final<|message|>",
    ),
    _Family(  # Gemma 4
        ("<|tool_call>", "<tool_call|>"),
        {
            "open_pattern": rf"<\|tool_call>call:{_NAME}",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": _NAMED,
        },
        None,
        {"reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"}},
    ),
    _Family(  # FunctionGemma
        ("<start_function_call>",),
        {
            "open_pattern": rf"<start_function_call>call:{_NAME}",
            "close": "<end_function_call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            "transform": _NAMED,
        },
    ),
    _Family(  # Mistral, since tokenizer 11
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "open_pattern": rf"\[TOOL_CALLS\]{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "content": "json",
            "transform": _NAMED,
        },
        CallFormat("[TOOL_CALLS]", "[ARGS]", "", separator=""),
    ),
    _Family(  # Mistral
        ("[TOOL_CALLS]",),
        {"open_pattern": r"\[TOOL_CALLS\]\s*", "content": "json", "transform": _EACH, "transform_each": True},
        CallFormat('{"name": "', '", "arguments": ', "}", opens="[TOOL_CALLS][", closes="]", separator=", "),
    ),
    _Family(  # Qwen3-Coder, Qwen 3.5
        ("<tool_call>", "<function=", "<parameter="),
        {
            "open_pattern": rf"<tool_call>\s*<function={_NAME}>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _NAMED,
        },
    ),
    _Family(  # GLM-4.5
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        {
            "open_pattern": rf"<tool_call>\s*{_NAME}",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)"
                r"</arg_value>"
            },
            "transform": _NAMED,
        },
    ),
    _Family(  # Qwen 2.5, Qwen3, Hermes
        ("<tool_call>", "</tool_call>"),
        {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"function": "{content}"},
        },
        _json_call("<tool_call>\n", "arguments", "\n</tool_call>", "\n"),
    ),
    _Family(  # Llama 3.1 to 3.3: the whole answer is the call
        ("<|start_header_id|>", '"parameters"'),
        {
            "open_pattern": r'^\s*(?:<\|python_tag\|>)?(?=\s*\{\s*"(?:name|type)")',
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
        },
        _json_call("", "parameters", "", None),
    ),
)
_REASONING = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


@lru_cache(maxsize=1024)
def family_format(chat_template: str) -> AnswerFormat | None:
    """Return the format of the family with this chat template; None if it is not known."""
    described, family = family_fields(chat_template), _family_of(chat_template)
    if described["fields"].keys() == {"content"}:
        return None
    template = template_of(described)
    if family is None:
        return AnswerFormat(template, None, _reasoning_marks(template))
    reasoning = family.reasoning or _reasoning_marks(template)
    return AnswerFormat(template, family.format, reasoning, family.opens_content)


def _family_of(chat_template: str) -> _Family | None:
    return next((one for one in _FAMILIES if all(mark in chat_template for mark in one.marks)), None)


def family_fields(chat_template: str) -> dict[str, Any]:
    """Return the response template, as JSON, of the family with this chat template."""
    family = _family_of(chat_template)
    fields: dict[str, Any] = {"content": {}}
    for marks in _REASONING:
        if marks.closes in chat_template:
            fields["reasoning_content"] = {"open": marks.opens, "close": marks.closes}
            break
    if family is not None:
        fields |= {CALLS_FIELD: family.calls, **(family.others or {})}
    return {"start_anchor": _ASSISTANT, "fields": fields}


def format_of(template: ResponseTemplate, chat_template: str | None) -> AnswerFormat:
    """Return the format that a model's own response template describes.

    What only patterns describe is as in the family of ``chat_template``, if the response template
    reads that.
    """
    family = None if chat_template is None else family_format(chat_template)
    field = template.fields.get(CALLS_FIELD)
    calls = None if field is None else _call_format(field)
    reasoning = _reasoning_marks(template)
    if calls is None and family is not None and _reads_calls(template, family.calls):
        calls = family.calls
    if reasoning is None and family is not None and _reads_reasoning(template, family.reasoning):
        reasoning = family.reasoning
    return AnswerFormat(template, calls, reasoning)


def _reads_calls(template: ResponseTemplate, calls: CallFormat | None) -> bool:
    if calls is None:
        return False
    name = f"{calls.opens}{calls.before_name}probe"
    text = f"{name}{calls.before_arguments}{{}}{calls.after_arguments}{calls.closes}"
    for end in ("", *_END_MARK.findall(mark_texts(template))):
        answer = parsed(text + end, TemplateParser(template, ParserOptions(), ""))
        if [(one.head.name, one.arguments) for one in answer.calls] == [("probe", "{}")]:
            return True
    return False


def _reads_reasoning(template: ResponseTemplate, marks: ReasoningMarks | None) -> bool:
    if marks is None:
        return False
    text = f"{marks.opens}probe{marks.closes}{marks.after}"
    answer = parsed(text, TemplateParser(template, ParserOptions(), ""))
    return answer.reasoning == "probe" and not answer.content


def mark_texts(template: ResponseTemplate) -> str:
    """Return the texts of all marks, one a line."""
    texts: list[str] = []
    for field in template.fields.values():
        texts += [mark.text for mark in (field.opens, field.closes) if mark is not None]
        for pair in (field.content_args or {}).get("string_delims", ()):
            texts += pair
    return "\n".join(texts)


def plain_format(known: AnswerFormat | None) -> AnswerFormat:
    """Return a format with ``PLAIN_CALLS`` and the reasoning of ``known``."""
    fields = {"open_pattern": r"(?=\[)", "content": "json", "transform": _EACH, "transform_each": True}
    template = template_of({"start_anchor": _ASSISTANT, "fields": {CALLS_FIELD: fields, "content": {}}})
    if known is None:
        return AnswerFormat(template, PLAIN_CALLS)
    kept = {name: one for name, one in known.template.fields.items() if name in REASONING_FIELDS}
    template = replace(template, fields={**template.fields, **kept}, start=known.template.start)
    return AnswerFormat(template, PLAIN_CALLS, known.reasoning)


def _reasoning_marks(template: ResponseTemplate) -> ReasoningMarks | None:
    for name in REASONING_FIELDS:
        field = template.fields.get(name)
        opens, closes = (field.opens, field.closes) if field is not None else (None, None)
        if opens and closes and opens.literals and closes.literals:
            return ReasoningMarks(opens.literals[0], closes.literals[0])
    return None


def _call_format(field: TemplateField) -> CallFormat | None:
    """Return the text around the calls of a response template, if it is certain."""
    keys = keys_of(field)
    if keys is None or keys.arguments is None or field.opens is None or not field.opens.literals:
        return None
    before = field.opens.literals[0]
    after = field.closes.literals[0] if field.closes and field.closes.literals else ""
    if field.closes is not None and not field.closes.literals:
        return None
    if keys.in_list:
        return CallFormat(
            f'{{"{keys.name}": "',
            f'", "{keys.arguments}": ',
            "}",
            opens=f"{before}[",
            closes=f"]{after}",
            separator=", ",
        )
    return CallFormat(
        f'{before}{{"{keys.name}": "',
        f'", "{keys.arguments}": ',
        f"}}{after}",
        separator="" if after else None,
    )
