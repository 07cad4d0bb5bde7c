"""A model that says what its script says, calls functions and thinks: no weights are trained.

The next token depends on the last one alone. A prompt of its chat template ends with a token that
names a script; each piece of a script is a token of its own. Where a grammar rules, the model
writes the shortest text: it closes what can be closed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CITY = "Paris"
ANSWER = "It is sunny."
THOUGHT = "I look outside."
MAX_MODEL_LEN = 16384

_END = "<|im_end|>"


# By the name of a script: its pieces, each one token.
SCRIPTS: Mapping[str, Sequence[str]] = {
    "say": ("It is ", "sunny."),
    "report": ('{"city": "Paris", ', '"degrees": 20, ', '"is_sunny": true}'),
    "think": ("<think>", "I look ", "outside.", "</think>", "\n\nIt is sunny."),
    "get_weather": (
        *("<tool_call>", '\n{"name": "get_weather", ', '"arguments": {"city": '),
        *(f'"{CITY}"}}}}\n', "</tool_call>"),
    ),
}
# The model calls the function that has a script, until it gets a result, and writes a report if the
# conversation has its schema.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% set next = namespace(script='think' if reasoning_effort is defined else 'say') %}
{%- if tools and messages[-1].role != 'tool' %}
{%- for tool in tools if tool.function.name == 'get_weather' %}
{%- set next.script = 'get_weather' %}{% endfor %}
{%- elif not tools and 'is_sunny' in messages | map(attribute='content') | join %}
{%- set next.script = 'report' %}
{%- endif %}<|{{ next.script }}|>{% endif %}"""
# The classes of tokens between which a grammar leaves the choice, the preferred one first.
_PREFERRED = (_END, '"', "}", "]", ",", ":", "0123456789", "{[", "abcdefghijklmnopqrstuvwxyz")
_STEP, _FOLLOWS = 20.0, 1000.0
_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def save_scripted_model(directory: Path) -> None:
    """Save the model with its tokenizer."""
    tokenizer, specials = _tokenizer()
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "additional_special_tokens": specials,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=math.ceil(num_tokens / 64) * 64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=MAX_MODEL_LEN,
            eos_token_id=tokenizer.token_to_id(_END),
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    weights = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    weights |= {name: one + 1 for name, one in weights.items() if "norm" in name}
    hidden = model.config.hidden_size
    weights["model.embed_tokens.weight"] = torch.eye(num_tokens, hidden)
    # The norm multiplies the one entry of an embedding by the square root of their number.
    weights["lm_head.weight"][:, :num_tokens] = _scores(tokenizer).T / math.sqrt(hidden)
    model.load_state_dict(weights)
    model.to(torch.float32).save_pretrained(directory)


def _tokenizer() -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of bytes, pieces and marks, and its special tokens."""
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = _TO_BYTES
    tokenizer.decoder = decoders.ByteLevel()
    specials = [_END, "<|im_start|>", *(f"<|{name}|>" for name in SCRIPTS)]
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in specials])
    pieces = dict.fromkeys(piece for script in SCRIPTS.values() for piece in script)
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in pieces])
    return tokenizer, specials[1:]


def _scores(tokenizer: Tokenizer) -> torch.Tensor:
    """Return the logits [last token, next token]."""
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    scores = torch.zeros(num_tokens, num_tokens)
    scores[:] = -_STEP * len(_PREFERRED)
    for rank, texts in enumerate(_PREFERRED):
        for text in [texts] if texts == _END else texts:
            scores[:, _id(tokenizer, text)] = -_STEP * rank
    for name, pieces in SCRIPTS.items():
        chain = [f"<|{name}|>", *pieces, _END]
        for last, following in pairwise(_id(tokenizer, text) for text in chain):
            scores[last, following] = _FOLLOWS
    return scores


def _byte_level(text: str) -> str:
    ((characters, _),) = _TO_BYTES.pre_tokenize_str(text)
    return str(characters)


def _id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a mark, a piece or a character."""
    found = tokenizer.token_to_id(text)
    found = tokenizer.token_to_id(_byte_level(text)) if found is None else found
    assert found is not None
    return found
