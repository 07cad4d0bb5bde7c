"""Chat templates are rendered as by transformers, and stay in the sandbox."""

from pathlib import Path
from typing import Any

import pytest
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.frontend.chat_template import RENDER_ERRORS, ChatTemplate
from jinja2 import TemplateError
from support.tokenizers import save_sample_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'exact'."},
    {"role": "user", "content": "Grüße, 世界 😀\n"},
    {"role": "assistant", "content": "Hello.", "reasoning": "Polite."},
    {"role": "user", "content": "  again  ", "name": "Ann"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "description": "<b>size</b> & 'weight'",
            "parameters": {"type": "object", "properties": {"x": {"type": "number"}}},
        },
    }
]
RENDERED = {
    "roles": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "blocks are trimmed": "a\n  {% if true %}\n  b\n  {% endif %}\n{%- for m in messages %}\n"
    "{{ m.role }}\n{% endfor %}\nz\n",
    "tools": "{% for tool in tools or [] %}{{ tool | tojson }}\n{{ tool | tojson(indent=2) }}\n"
    "{{ tool | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}{% endfor %}",
    "tools and documents may be none": "{{ tools is none }} {{ documents is none }}",
    "unicode": "{{ messages | tojson }} {{ messages[0].content | tojson }} {{ '<&' }}",
    "break": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "continue": "{% for m in messages %}{% if loop.index is odd %}{% continue %}{% endif %}"
    "{{ loop.index }}{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}{{ loop.index }}{% endgeneration %}{{ x }}\n{% endfor %}",
    "namespace": "{% set ns = namespace(self=1, n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}{{ ns.self }}"
    "{{ namespace({'a': 3}).a }}",
    "dict": "{{ dict(a=1, b=[2]) }} {{ dict.fromkeys('ab', 0) }} {{ {'a': 1}.items() | list }}",
    "variables": "{{ thinking | default('off') }} {{ unk_token }} {{ pad_token is defined }}",
    "macros": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}"
    "{% for m in messages if m.role != 'system' %}{{ say(m) }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}"
    "{{ m.reasoning }}{% endfor %}",
    "strings": "{{ messages[0].content.split(' ')[0].upper() }}{{ '%s' | format('x') }}"
    "{{ messages[-1].get('name', 'no') }}{{ messages[0].get('name', 'no') }}",
}
REFUSED = {
    "raised": "{{ raise_exception('roles must alternate') }}",
    "no number": "{{ messages[0]['content'] + 1 }}",
    "undefined": "{{ messages[0].nothing.more }}",
    "division": "{{ 1 / 0 }}",
    "syntax": "{% for m in messages %}",
    "not JSON": "{{ nothing | tojson }}",
}
FORBIDDEN = {
    "change of messages": "{{ messages.append(1) }}",
    "change by a class": "{{ dict.update(messages[0], {'role': 'x'}) }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__.sys }}",
    "attribute of a namespace": "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "first attribute of a namespace": "{{ namespace(**{'__html__': 1}) }}",
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_sample_tokenizer("sentencepiece", directory)
    return load_tokenizer(str(directory))


def render(hf: Any, source: Any, **variables: Any) -> str:
    template = ChatTemplate(source, hf.special_tokens_map)
    return template.render(MESSAGES, add_generation_prompt=True, **variables)


def expected(hf: Any, source: Any, **variables: Any) -> str:
    hf.chat_template = source
    text = hf.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **variables)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", RENDERED)
@pytest.mark.parametrize(
    "variables", [{}, {"tools": TOOLS, "thinking": "on", "unk_token": "other"}], ids=["", "given"]
)
def test_it_is_rendered_as_by_transformers(hf: Any, name: str, variables: dict[str, Any]) -> None:
    source = RENDERED[name]
    assert render(hf, source, **variables) == expected(hf, source, **variables)


@pytest.mark.parametrize("name", REFUSED)
def test_what_goes_wrong_is_the_same_error(hf: Any, name: str) -> None:
    with pytest.raises(RENDER_ERRORS) as own:
        render(hf, REFUSED[name])
    with pytest.raises(RENDER_ERRORS) as theirs:
        expected(hf, REFUSED[name])
    assert type(own.value) is type(theirs.value)
    assert str(own.value) == str(theirs.value)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_templates_stay_in_the_sandbox(hf: Any, name: str) -> None:
    with pytest.raises(TemplateError):
        render(hf, FORBIDDEN[name])
    with pytest.raises(TemplateError):
        expected(hf, FORBIDDEN[name])


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("templates", [{"default": "plain"}, {"tool_use": "tools", "default": "plain"}])
def test_one_of_several_is_chosen(
    hf: Any, templates: dict[str, str], tools: list[dict[str, Any]] | None
) -> None:
    assert render(hf, templates, tools=tools) == expected(hf, templates, tools=tools)


@pytest.mark.parametrize("content", ["Hello", " Hello, ", "Hello\n", "Hel. Hel"])
@pytest.mark.parametrize(
    "source",
    [
        RENDERED["roles"],  # which trims
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{% endfor %}{# content #}",
        "{{ messages[0].content }}",
    ],
)
def test_a_continued_message_is_left_open(hf: Any, source: str, content: str) -> None:
    def of(render: Any) -> str:
        try:
            return str(render())
        except ValueError:
            return "refused"

    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    hf.chat_template = source
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    template = ChatTemplate(source, hf.special_tokens_map)
    own = of(lambda: template.render(messages, **options))
    assert own == of(lambda: hf.apply_chat_template(messages, tokenize=False, **options))


def test_what_has_no_text_is_not_continued(hf: Any) -> None:
    template = ChatTemplate(RENDERED["roles"], hf.special_tokens_map)
    for messages in ([], [{"role": "assistant"}], [{"role": "assistant", "content": None}]):
        with pytest.raises(ValueError, match="no content"):
            template.render(messages, add_generation_prompt=False, continue_final_message=True)


def test_several_without_a_default_are_refused(hf: Any) -> None:
    with pytest.raises(ValueError, match=r"no default template; it has \['rag'\]"):
        render(hf, {"rag": "x"})


# As Llava's and Idefics' are: they go through the parts of a message, images first.
_OF_PARTS = (
    "{% for message in messages %}{{ message['role'].upper() }}:"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    " {{ part['text'] }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_BY_PLACE = "{% for m in messages %}[{{ m['content'][0]['text'] }}]{% endfor %}"
_OF_BOTH = (
    "{% for m in messages %}{% if m['content'] is string %}S{{ m['content'] }}"
    "{% else %}P{{ m['content'][0]['text'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (_OF_PARTS, "USER: hello\nASSISTANT: hi\nUSER: you\nASSISTANT:"),
        (_BY_PLACE, "[hello][hi][you]"),
        (_OF_BOTH, "ShelloShiSyou"),
        ("{{ messages | length }}", "3"),  # writes no content at all
    ],
)
def test_templates_that_write_parts_alone_get_parts(source: str, expected: str) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "you"},
    ]
    template = ChatTemplate(source, {})
    assert template.render(messages, add_generation_prompt=True) == expected


def test_a_message_in_parts_can_be_continued() -> None:
    template = ChatTemplate(_OF_PARTS, {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "USER: a\nASSISTANT: b c"
