"""Chat completions with tools and reasoning, over HTTP with scripted answers."""

import json
from typing import Any

import httpx
import pytest
from support.answer_samples import ADD, NOW, SAMPLES
from support.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
QWEN, LLAMA = SAMPLES["qwen"], SAMPLES["llama"]
ADD_TOOL = {"type": "function", "function": {"name": "add", "parameters": ADD}}
TOOLS = [ADD_TOOL, {"type": "function", "function": {"name": "now"}}]
QUESTION = [{"role": "user", "content": "1 + 2?"}]
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object", "properties": {"z": {"type": "null"}}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "z", "schema": SCHEMA}}


@pytest.fixture(autouse=True)
def qwen(engine: FakeEngine) -> None:
    engine.chat_template, engine.answer = QWEN.chat_template, QWEN.text


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": QUESTION} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refused(http: httpx.Client, **fields: Any) -> tuple[str, str]:
    response = http.post(CHAT, json={"messages": QUESTION} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return str(error["param"]), str(error["message"])


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(CHAT, json={"messages": QUESTION, "stream": True} | fields)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def grammar_of(engine: FakeEngine) -> str | None:
    structured = engine.seen[-1][1].structured_output
    assert structured is None or structured.kind == "grammar"
    return None if structured is None else structured.text


def test_calls_and_reasoning_stand_beside_the_content(http: httpx.Client, engine: FakeEngine) -> None:
    (choice,) = post(http, tools=TOOLS)["choices"]
    message = choice["message"]
    calls = message.pop("tool_calls")
    assert message == {
        "role": "assistant",
        "content": "I call.",
        "reasoning_content": "Let me\nadd.",
        "reasoning": "Let me\nadd.",
    }
    assert choice["finish_reason"] == "tool_calls"
    assert [(one["type"], one["function"]) for one in calls] == [
        ("function", {"name": name, "arguments": arguments}) for name, arguments in QWEN.calls
    ]
    assert len({one["id"] for one in calls}) == 2
    prompt = engine.seen[-1][0]
    assert "".join(map(chr, prompt)).startswith("<tool>add<tool>now")  # type: ignore[arg-type]
    assert grammar_of(engine) is None


@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
def test_a_stream_has_the_same_parts(http: httpx.Client, engine: FakeEngine, tokens_per_output: int) -> None:
    engine.tokens_per_output = tokens_per_output
    choices = stream(http, tools=TOOLS)
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(one.get("content", "") for one in deltas) == QWEN.content
    assert "".join(one.get("reasoning_content", "") for one in deltas) == QWEN.reasoning
    pieces = [piece for one in deltas for piece in one.get("tool_calls", ())]
    heads = [piece for piece in pieces if "id" in piece]
    assert [(one["index"], one["type"], one["function"]["name"]) for one in heads] == [
        (0, "function", "add"),
        (1, "function", "now"),
    ]
    for index, (_, arguments) in enumerate(QWEN.calls):
        own = [one["function"]["arguments"] for one in pieces if one["index"] == index]
        assert "".join(own) == arguments
        assert pieces.index(heads[index]) == min(at for at, one in enumerate(pieces) if one["index"] == index)
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["delta"] == {}


def test_a_stream_with_tokens_shows_each_once(http: httpx.Client) -> None:
    choices = stream(http, tools=TOOLS, return_token_ids=True, logprobs=True, n=2)
    for index in range(2):
        own = [one for one in choices if one["index"] == index]
        tokens = [token for one in own for token in one.get("token_ids") or ()]
        assert "".join(map(chr, tokens)) == QWEN.text
        scored = [one for choice in own if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert len(scored) == len(QWEN.text)


def test_each_choice_has_calls_of_its_own(http: httpx.Client) -> None:
    choices = post(http, tools=TOOLS, n=2)["choices"]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


def test_one_call_unless_calls_are_parallel(http: httpx.Client) -> None:
    (choice,) = post(http, tools=TOOLS, parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_only_calls_leave_no_content(http: httpx.Client, engine: FakeEngine) -> None:
    engine.chat_template, engine.answer = LLAMA.chat_template, LLAMA.text
    (choice,) = post(http, tools=TOOLS)["choices"]
    assert choice["message"]["content"] is None
    (choice,) = post(http, tools=TOOLS, max_tokens=12)["choices"]  # it is cut
    assert choice["message"]["content"] == LLAMA.text[:12]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"parallel_tool_calls": True, "store": False},
        {"tools": None, "tool_choice": None},
    ],
)
def test_requests_that_merely_carry_such_fields(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.chat_template, engine.answer = None, QWEN.text
    (choice,) = post(http, **fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": QWEN.text}
    assert "<tool>" not in "".join(map(chr, engine.seen[-1][0]))  # type: ignore[arg-type]


def test_reasoning_is_split_off_without_tools(http: httpx.Client, engine: FakeEngine) -> None:
    rest = QWEN.text.partition("</think>")[2].lstrip()
    (choice,) = post(http)["choices"]
    assert choice["message"]["content"] == rest
    assert choice["message"]["reasoning_content"] == QWEN.reasoning
    (choice,) = post(http, include_reasoning=False)["choices"]
    assert choice["message"] == {"role": "assistant", "content": rest}
    (choice,) = post(http, separate_reasoning=False)["choices"]
    assert choice["message"] == {"role": "assistant", "content": QWEN.text}


def test_fields_are_variables_of_the_template(http: httpx.Client, engine: FakeEngine) -> None:
    seen: list[dict[str, Any]] = []
    render = engine.tokenizer.apply_chat_template

    def spied(*args: Any, **variables: Any) -> str:
        seen.append(variables)
        return render(*args, **variables)

    engine.tokenizer.apply_chat_template = spied  # type: ignore[method-assign]
    try:
        post(http, reasoning_effort="none", verbosity="low")
        assert (
            seen[-1].items()
            >= {"reasoning_effort": "none", "enable_thinking": False, "verbosity": "low"}.items()
        )
        post(http, enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
        assert seen[-1]["enable_thinking"] is False
        post(http)
        assert not {"tools", "reasoning_effort", "verbosity", "enable_thinking"} & seen[-1].keys()
    finally:
        engine.tokenizer.apply_chat_template = render  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "choice",
    ["required", NAMED, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}],
)
def test_forced_calls_have_a_grammar(http: httpx.Client, engine: FakeEngine, choice: Any) -> None:
    post(http, tools=TOOLS, tool_choice=choice)
    grammar = grammar_of(engine)
    assert grammar is not None and "start: (opens thoughts)? calls\n" in grammar
    assert '<tool_call>\\n{\\"name\\": \\"' in grammar
    assert ("now" in grammar) == (choice == "required")


def test_strict_functions_have_a_grammar_where_they_are_called(
    http: httpx.Client, engine: FakeEngine
) -> None:
    strict = {"type": "function", "function": ADD_TOOL["function"] | {"strict": True}}  # type: ignore[operator]
    post(http, tools=[strict, TOOLS[1]])
    grammar = grammar_of(engine)
    assert grammar is not None and "(lead tail | ANY)" in grammar
    assert '"integer"' in grammar


def test_structured_output_beside_reasoning_and_tools(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = '{"z": null}'
    post(http, response_format=RESPONSE_FORMAT)
    grammar = grammar_of(engine)
    assert grammar is not None and "start: (opens thoughts)? plain" in grammar
    post(http, response_format=RESPONSE_FORMAT, tools=TOOLS)
    grammar = grammar_of(engine)
    assert grammar is not None and "(calls | plain)" in grammar
    post(http, structured_outputs={"regex": "[a-z]+"})
    assert engine.seen[-1][1].structured_output.kind == "regex"  # type: ignore[union-attr]
    param, message = refused(http, structured_outputs={"regex": "a"}, tools=TOOLS)
    assert param == "structured_outputs.regex" and "not served beside tools" in message


@pytest.mark.parametrize("given", [{"guided_json": "{"}, {"structured_outputs": {"json": "[" * 9999}}])
def test_structure_that_is_no_json_is_left_to_its_own_check(
    http: httpx.Client, engine: FakeEngine, given: dict[str, Any]
) -> None:
    post(http, **given)
    structured = engine.seen[-1][1].structured_output
    assert structured is not None and structured.kind == "json_schema"


def test_an_empty_answer(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = "\n"
    for fields in ({"tools": TOOLS}, {}):
        (choice,) = post(http, **fields)["choices"]
        assert choice["message"] == {"role": "assistant", "content": ""}
        assert choice["finish_reason"] == "stop"


def test_models_whose_calls_are_not_known(http: httpx.Client, engine: FakeEngine) -> None:
    engine.chat_template = None
    param, message = refused(http, tools=TOOLS)
    assert param == "tool_choice"
    assert "--response-template FILE" in message
    engine.answer = '[{"name": "add", "arguments": {"x": 1}}]'
    (choice,) = post(http, tools=TOOLS, tool_choice="required")["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"x": 1}'}


def test_a_template_that_leaves_tools_out_is_refused(http: httpx.Client, engine: FakeEngine) -> None:
    engine.tokenizer.leaves_tools_out = True
    try:
        param, message = refused(http, tools=TOOLS)
    finally:
        engine.tokenizer.leaves_tools_out = False
    assert (param, "'add'" in message, "--chat-template FILE" in message) == ("tools", True, True)


def test_special_tokens_in_marks_are_kept(http: httpx.Client, engine: FakeEngine) -> None:
    engine.tokenizer.special_texts = ("<tool_call>",)
    try:
        post(http, tools=TOOLS)
        assert not engine.seen[-1][1].skip_special_tokens
    finally:
        engine.tokenizer.special_texts = ()
    post(http, tools=TOOLS)
    assert engine.seen[-1][1].skip_special_tokens


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"tools": {}}, "tools", "valid list"),
        ({"tools": ["f"]}, "tools[0]", "an object with type and function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'only "function" is served'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object with name"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [function(name=None)]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "a JSON schema"),
        (
            {"tools": [function(parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
            '"object"',
        ),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "a boolean"),
        ({"tools": [function(), function()]}, "tools", 'two functions named "f"'),
        ({"tools": [function(name=f"f{i}") for i in range(1025)]}, "tools", "at most 1024"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "one of none, auto, required"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "one of none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name", "a string"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "only"),
        ({"tools": TOOLS, "tool_choice": function(name="sub")}, "tool_choice", "not in tools"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
            "an object with mode and tools",
        ),
        ({"tools": TOOLS, "functions": TOOLS}, "functions", "write tools"),
        (
            {"tools": TOOLS, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
            "cannot be set",
        ),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, fields: dict[str, Any], param: str, what: str) -> None:
    found, message = refused(http, **fields)
    assert found == param
    assert what in message


def test_parameters_that_are_left_out_are_none(http: httpx.Client, engine: FakeEngine) -> None:
    post(http, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    grammar = grammar_of(engine)
    assert grammar is not None
    assert json.dumps(NOW)[1:-1] in grammar
