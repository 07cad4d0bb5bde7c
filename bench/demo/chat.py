"""Renders conversations as text and token ids for the demo model. Stdlib only."""

NUM_BYTES = 256  # a byte's token id is its value; the special tokens come behind

END_OF_TEXT = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END, PAD)
SPECIAL_IDS = {token: NUM_BYTES + place for place, token in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def encode_text(text: str) -> list[int]:
    """Token ids of ``text``, in which special tokens are not looked for."""
    return list(text.encode())
