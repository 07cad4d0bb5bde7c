"""The fields of a request's body that routing needs; the body is forwarded unchanged. Pure.

Engines validate bodies: an invalid field is ignored here.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ...adapters.mix import MAX_PARTS
from ...server.completions import DEFAULT_MAX_TOKENS

# Ends of beginnings, in bytes: first about one KV block of 16 tokens apart, then more.
_ENDS = (64, 128, 256, *range(512, 512 * 129, 512))
_SESSION_BYTES = 256  # of a prompt's beginning, which identifies a session
_QUOTES = 2
# The responses route has other names, and vLLM puts details between the counts.
_USAGE = re.compile(rb'"usage":\s*\{[^{}]*?"(?:prompt|input)_tokens":\s*(\d+)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cache_read_input_tokens":\s*(\d+)')  # Anthropic's, beside the others
# The field of a path's body with what the model reads; else "prompt".
_TEXT_FIELDS = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/messages": "messages"}


class _Fields(msgspec.Struct):
    """The fields that routing reads, of any type."""

    model: Any = None
    lora: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    predicted_output_tokens: Any = None
    n: Any = None
    user: Any = None
    cache_salt: Any = None


_decode = msgspec.json.Decoder(_Fields).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFacts:
    """The facts of one request, from its body."""

    model: str | None
    lora: tuple[str, ...] | None  # adapters that answer together; None = the field is not given
    text: bytes  # tools and instructions, then prompts, messages or input, as JSON
    is_chat: bool  # a chat template renders the text
    is_plain: bool  # the text is the value of ``prompt`` or ``messages`` alone
    start: int  # in the text, of what follows tools and instructions
    num_ids: int | None  # number of token ids; None = the prompt is text
    num_choices: int  # over all prompts
    max_output_tokens: int | None  # of each choice
    predicted_output_tokens: int | None  # given by the client
    user: str | None
    cache_salt: str | None

    @property
    def session(self) -> str | None:
        """The user, or the beginning of the prompt, without tools; None if neither is known."""
        if self.user is not None or not self.text:
            return self.user
        return f"{hash(self.text[self.start : self.start + _SESSION_BYTES]):x}"

    def beginnings(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return beginnings of rising length, see ``RouteRequest``; ``num_tokens``: of all text."""
        text = self.text
        key, start, found = hash(self.cache_salt), 0, []
        for end in _ENDS:
            if end > len(text):
                break
            key = hash((key, text[start:end]))
            found.append((key, num_tokens * end // len(text)))
            start = end
        return tuple(found)


_UNREADABLE = BodyFacts(
    model=None,
    lora=None,
    text=b"",
    is_chat=False,
    is_plain=False,
    start=0,
    num_ids=0,
    num_choices=1,
    max_output_tokens=1,
    predicted_output_tokens=None,
    user=None,
    cache_salt=None,
)


def read_facts(body: bytes, path: str) -> BodyFacts:
    """Read the facts of a body; one that is no JSON object has none. O(bytes)."""
    field = _TEXT_FIELDS.get(path, "prompt")
    if path == "/tokenize" and b'"messages"' in body:
        field = "messages"
    is_chat = field != "prompt"
    try:
        fields = _decode(body)
        text = bytes(getattr(fields, field))
        num_prompts, num_ids = (1, None) if is_chat else _count(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _UNREADABLE
    first = (fields.tools, fields.instructions, fields.system) if is_chat else ()
    before = b"".join(map(bytes, first))
    limit = _count_or_none(fields.max_completion_tokens) if is_chat else None
    limit = limit or _count_or_none(fields.max_tokens) or _count_or_none(fields.max_output_tokens)
    return BodyFacts(
        model=_text_or_none(fields.model),
        lora=_names(fields.lora) if fields.lora else None,
        text=before + text,
        is_chat=is_chat,
        is_plain=path not in ("/v1/responses", "/v1/messages") and not before,
        start=len(before),
        num_ids=num_ids,
        num_choices=num_prompts * (_count_or_none(fields.n) or 1),
        max_output_tokens=limit if is_chat else limit or DEFAULT_MAX_TOKENS,
        predicted_output_tokens=_count_or_none(fields.predicted_output_tokens),
        user=_text_or_none(fields.user),
        cache_salt=_text_or_none(fields.cache_salt),
    )


def read_usage(body: bytes) -> tuple[int, int] | None:
    """Return tokens of prompts and outputs from the usage at the end of an answer, if there is one.

    Generated text cannot look like usage, since quotes in it are escaped.
    """
    start = body.rfind(b'"usage":')
    found = _USAGE.match(body, start) if start >= 0 else None
    if found is None:
        return None
    output, cached = (one.search(body, found.end()) for one in (_OUTPUT, _CACHED))
    return (
        int(found[1]) + (int(cached[1]) if cached is not None else 0),
        int(output[1]) if output is not None else 0,
    )


def _count(prompt: bytes) -> tuple[int, int | None]:
    """Return the number of prompts, and of their token ids; None if they are text."""
    if not prompt.startswith(b"["):
        return 1, None
    first = prompt[1:].lstrip()[:1]
    if first.isdigit():
        return 1, prompt.count(b",") + 1
    items = _decode_items(prompt)
    if first != b"[":
        return max(len(items), 1), None
    return max(len(items), 1), sum(bytes(item).count(b",") + 1 for item in items)


def _names(lora: object) -> tuple[str, ...]:
    """Return the names of a mix; those that no engine accepts are left out."""
    parts = lora if isinstance(lora, list) and len(lora) <= MAX_PARTS else ()
    names = [part.get("name") if isinstance(part, dict) else None for part in parts]
    return tuple(name for name in names if isinstance(name, str))


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count_or_none(value: object) -> int | None:
    """A valid positive count, or None."""
    return value if type(value) is int and 0 < value < 2**31 else None


class TokenRatio:
    """Bytes of text per token, measured by adapter and kind of body."""

    def __init__(self) -> None:
        self._bytes_per_token: dict[tuple[str | None, bool], float] = {}

    def num_tokens(self, text: bytes, name: str | None, *, is_chat: bool) -> int:
        known = self._bytes_per_token
        ratio = known.get((name, is_chat)) or known.get((None, is_chat)) or _BYTES_PER_TOKEN
        return max(1, round((len(text) - _QUOTES) / ratio))

    def observe(self, text: bytes, num_tokens: int, name: str | None, *, is_chat: bool) -> None:
        """Record that ``text`` has ``num_tokens``, for this adapter and for all."""
        if num_tokens < _MIN_TOKENS:
            return
        ratio = len(text) / num_tokens
        for key in ((name, is_chat), (None, is_chat)):
            before = self._bytes_per_token.setdefault(key, ratio)
            self._bytes_per_token[key] = before + _LEARNING_RATE * (ratio - before)
        if len(self._bytes_per_token) > _MAX_RATIOS:
            self._bytes_per_token.pop(next(iter(self._bytes_per_token)))


_BYTES_PER_TOKEN = 4.0  # English text; the initial value
_MIN_TOKENS = 8  # shorter prompts are mostly special tokens
_LEARNING_RATE = 0.1
_MAX_RATIOS = 4096
