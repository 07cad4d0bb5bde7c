"""Answers as model families write them, with the marks of their chat templates."""

from dataclasses import dataclass
from typing import Any

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "string"}},
    "required": ["x"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Sample:
    """One answer: what the model writes, and what it means."""

    chat_template: str  # its marks alone
    prompt: str  # its end
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


_ADD_CALL = ("add", '{"x": 1, "y": "a<b"}')
_QWEN = "<|im_start|> <think></think> <tool_call> </tool_call>"
_CHATML = "<|im_start|>user\nhi <tool_call> <think><|im_end|>\n<|im_start|>assistant\n"
_GPT_OSS = "<|start|> <|channel|> <|message|>"
_GEMMA = "<|tool_call> <tool_call|> <|channel>thought <channel|>"

SAMPLES = {
    "qwen": Sample(
        _QWEN,
        _CHATML,
        '<think>\nLet me\nadd.\n</think>\n\nI call.\n<tool_call>\n{"name": "add", "arguments": '
        '{"x": 1, "y": "a<b"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n'
        "</tool_call>",
        "I call.",
        "Let me\nadd.",
        (_ADD_CALL, ("now", "{}")),
    ),
    "qwen, reasoning begun by the prompt": Sample(
        _QWEN, f"{_CHATML}<think>\n", "hm</think>\n\nHello < you.\n", "Hello < you.", "hm"
    ),
    "qwen without reasoning": Sample(
        _QWEN,
        f"{_CHATML}<think>\n\n</think>\n\n",
        "Hello.\n\n 2 <think is text.",
        "Hello.\n\n 2 <think is text.",
    ),
    "qwen coder": Sample(
        "<|im_start|> <tool_call> <function= <parameter=",
        _CHATML,
        "Now.\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\na<b\n"
        "</parameter>\n</function>\n</tool_call>",
        "Now.",
        "",
        (_ADD_CALL,),
    ),
    "glm": Sample(
        "<tool_call> <arg_key> <arg_value> </think>",
        "<|assistant|>",
        "\n<think>hm</think>\nNow.\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>"
        "\n<arg_key>y</arg_key>\n<arg_value>a<b</arg_value>\n</tool_call>",
        "Now.",
        "hm",
        (_ADD_CALL,),
    ),
    "llama": Sample(
        '<|start_header_id|> "parameters"',
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '{"name": "add", "parameters": {"x": 1, "y": "a<b"}}',
        "",
        "",
        (_ADD_CALL,),
    ),
    "llama, text": Sample(
        '<|start_header_id|> "parameters"',
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        'It is {"name": 3}.',
        'It is {"name": 3}.',
    ),
    "mistral": Sample(
        "[TOOL_CALLS]",
        "[INST]hi[/INST]",
        '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1, "y": "a<b"}}, {"name": "now", "arguments": {}}]',
        "",
        "",
        (_ADD_CALL, ("now", "{}")),
    ),
    "mistral 11": Sample(
        "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
        "[INST]hi[/INST]",
        '[THINK]hm[/THINK]Now:[TOOL_CALLS]add[ARGS]{"x": 1, "y": "a<b"}[TOOL_CALLS]now[ARGS]{}',
        "Now:",
        "hm",
        (_ADD_CALL, ("now", "{}")),
    ),
    "gpt-oss": Sample(
        _GPT_OSS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"x": 1, "y": "a<b"}',
        "",
        "hm",
        (_ADD_CALL,),
    ),
    "gpt-oss, recipient first": Sample(
        _GPT_OSS,
        "<|start|>assistant",
        ' to=functions.add<|channel|>commentary json<|message|>{"x": 1, "y": "a<b"}<|call|>',
        "",
        "",
        (_ADD_CALL,),
    ),
    "gpt-oss, text": Sample(
        _GPT_OSS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        "Hi.",
        "hm",
    ),
    "gemma": Sample(
        _GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nhm<channel|><|tool_call>call:add{x:1,y:<|"|>a<b<|"|>}<tool_call|>',
        "",
        "hm",
        (_ADD_CALL,),
    ),
    "function gemma": Sample(
        "<start_function_call>",
        "<start_of_turn>model\n",
        "<start_function_call>call:add{x:1,y:<escape>a<b<escape>}<end_function_call>",
        "",
        "",
        (_ADD_CALL,),
    ),
}
