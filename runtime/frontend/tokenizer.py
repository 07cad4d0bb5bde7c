"""Text to tokens and back, and the model's chat template, for the front ends.

Adds special tokens exactly once, checks texts and token ids, and tokenizes all but short texts in
threads so that the event loop never stalls. Knows nothing of requests or of the engine.
"""

import contextlib
import operator
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import Any, SupportsIndex

from ..errors import RequestError
from ..limits import TextLimit, check_whole_text
from .chat_template import RENDER_ERRORS
from .codec import Codec
from .detokenizer import REPLACEMENT, Decoder, WindowStream
from .long_text import Span, TextPiece, is_long, long_text_tokens, num_worked_chars
from .special_stops import SpecialTokens
from .text_queue import MAX_SHORT_CHARS, TextQueue

_MAX_INLINE_CHARS = 4096  # encoded at once; longer texts go to a thread
_MAX_INLINE_TOKENS = 1024  # decoded at once
_MAX_WAITING_CHARS = 1 << 25  # of a tokenizer with a queue of its own
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A tokenizer of any kind, with checks and threads."""

    def __init__(self, codec: Codec, queue: TextQueue | None = None) -> None:
        """``queue``: shared with other tokenizers; None = its own."""
        self.codec = codec
        self.queue = queue or TextQueue(_MAX_WAITING_CHARS)
        # Tokenizers written in Python need not be safe for several threads.
        self._lock = contextlib.nullcontext() if codec.is_quick else threading.Lock()
        self._token_text = lru_cache(maxsize=1 << 16)(self._make_token_text)
        self._decoders = {skip: Decoder(codec.decoding(skip_special_tokens=skip)) for skip in (False, True)}
        self._anchor_ids: list[int] | None = None

    def close(self) -> None:
        """End the threads of its queue. Idempotent."""
        self.queue.close()

    # Text to tokens.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text``, by default with the model's special tokens.

        A text that a chat template rendered has its special tokens already: encode it without.
        Raises ``RequestError`` if ``text`` is not valid Unicode.
        """
        _check_unicode(text)
        with self._lock:
            return self.codec.encode(text, add_special_tokens=add_special_tokens)

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit | None = None
    ) -> list[int]:
        """``encode`` that does not block the event loop.

        With ``limit``, a text with too many tokens is not tokenized to its end, and of a long text
        only the tokens that ``limit`` keeps are returned. Raises also the error of ``limit``, and
        ``OverloadedError`` if too many texts wait.
        """
        encode = partial(self.encode, text, add_special_tokens=add_special_tokens)
        num_chars = len(text)
        is_short = num_chars <= _MAX_INLINE_CHARS and self.codec.is_quick
        if is_short and self.queue.takes_on_loop(num_chars):  # usual case
            return encode()
        with self.queue.admitted(num_chars, num_worked_chars(num_chars, limit)):
            if limit is not None and is_long(num_chars, limit):
                tokens = await self._encode_long(text, limit, add_special_tokens=add_special_tokens)
                if tokens is not None:
                    return tokens
                check_whole_text(num_chars, limit)
            return await self.queue.run(encode, num_chars, is_long=num_chars > MAX_SHORT_CHARS)

    async def _encode_long(
        self, text: str, limit: TextLimit, *, add_special_tokens: bool
    ) -> list[int] | None:
        """Tokenize ``text`` in windows. Returns None if that is not possible."""
        around: tuple[list[int], list[int]] | None = ([], [])
        if add_special_tokens:
            around = await self.queue.run(lambda: self._added_around, 1, is_long=True)
        steps = long_text_tokens(len(text), limit, around)
        try:
            span = next(steps)
            while True:
                work = partial(self._encode_span, text, span)
                piece = await self.queue.run(work, span[1] - span[0], is_long=True)
                span = steps.send(piece)
        except StopIteration as done:
            tokens: list[int] | None = done.value
            return tokens

    def _encode_span(self, text: str, span: Span) -> TextPiece:
        part = text[slice(*span)]
        _check_unicode(part, first_char=span[0])
        with self._lock:
            return self.codec.encode_piece(part)

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens that are added before and after a text; None = not known."""
        plain = self.encode("a", add_special_tokens=False)
        whole = self.encode("a", add_special_tokens=True)
        for at in range(len(whole) - len(plain) + 1):
            if plain and whole[at : at + len(plain)] == plain:
                return whole[:at], whole[at + len(plain) :]
        return None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render ``messages`` as the model's prompt; ``template_arguments`` are its variables.

        With ``continue_final_message`` the final message is left open after its content, and no
        generation prompt may follow. Raises ``RequestError`` if rendering fails.
        """
        if not self.codec.has_chat_template:
            raise RequestError(
                "the model has no chat template; give one with --chat-template FILE or use /v1/completions",
                param="messages",
            )
        try:
            return self.codec.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_arguments,
            )
        except RENDER_ERRORS as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error

    # Tokens to text.

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, with special tokens, beside the event loop."""
        decode = partial(self.decode, token_ids, skip_special_tokens=False)
        num_tokens = len(token_ids)
        if num_tokens <= _MAX_INLINE_TOKENS:  # usual case
            return decode()
        with self.queue.admitted(num_tokens):
            return await self.queue.run(decode, num_tokens, is_long=num_tokens > MAX_SHORT_CHARS)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's text, see ``token_text``, beside the event loop."""
        texts: list[str] = []
        with self.queue.admitted(len(token_ids)):
            for start in range(0, len(token_ids), _MAX_INLINE_TOKENS):
                some = token_ids[start : start + _MAX_INLINE_TOKENS]
                work = partial(list[str], map(self.token_text, some))
                texts += await self.queue.run(work, len(some), is_long=len(token_ids) > len(some))
        return texts

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; incomplete characters show as U+FFFD."""
        return self._decoders[skip_special_tokens].decode(token_ids)

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> WindowStream:
        """Return an incremental decoder for the tokens that follow ``prompt_token_ids``."""
        return WindowStream(self._decoders[skip_special_tokens], prompt_token_ids)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens, which texts omit by default."""
        return SpecialTokens(self.codec.special_tokens(), self.token_text)

    def token_text(self, token_id: int) -> str:
        r"""Return one token's text, with its leading space.

        A token that is not whole characters is written as ``bytes:\xe2\x82``.
        """
        return self._token_text(token_id)

    @cached_property
    def mark_ids(self) -> Mapping[str, int]:
        """The ids of added tokens that no free text of a grammar matches, by their texts."""
        return self.codec.mark_ids()

    def hides(self, text: str) -> bool:
        """Whether ``skip_special_tokens`` removes a part of ``text``."""
        return self.special_tokens.occur_in(text)

    def _make_token_text(self, token_id: int) -> str:
        raw = token_bytes(self.codec.token_name(token_id))
        if self._anchor_ids is None:
            self._anchor_ids = self.encode("a", add_special_tokens=False)
        # After another token, because the first token of a text may lose its space.
        anchor = self.decode(self._anchor_ids, skip_special_tokens=False)
        text = self.decode([*self._anchor_ids, token_id], skip_special_tokens=False)
        text = text[len(anchor) :]
        if REPLACEMENT in text and raw is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text


def _check_unicode(text: str, *, first_char: int = 0) -> None:
    """Raise ``RequestError`` unless ``text``, from ``first_char`` of a prompt on, is Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: {error.reason} at character {first_char + error.start}",
            param="prompt",
        ) from error


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int) -> list[int]:
    """Return ``token_ids``, not empty, as a list of Python's integers.

    Raises ``RequestError`` unless all are in the vocabulary.
    """
    checked = list(token_ids)
    if set(map(type, checked)) != {int}:  # rare
        checked = [_integer(position, value) for position, value in enumerate(checked)]
    if min(checked) < 0 or max(checked) >= vocab_size:
        position = next(at for at, token in enumerate(checked) if not 0 <= token < vocab_size)
        raise RequestError(
            f"token {position} of the prompt has id {checked[position]}, "
            f"the model's ids are 0 to {vocab_size - 1}",
            param="prompt",
        )
    return checked


def _integer(position: int, value: object) -> int:
    """Return ``value``, any kind of integer, as an ``int``."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    raise RequestError(f"token {position} of the prompt is {value!r}, token ids are integers", param="prompt")


def token_bytes(name: str | None) -> bytes | None:
    """Return the bytes that a vocabulary entry stands for; None if they are unknown."""
    if name is None:
        return None
    fallback = _BYTE_FALLBACK.fullmatch(name)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_level_alphabet()
    try:
        return bytes(alphabet[character] for character in name)
    except KeyError:
        return None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return the character of each byte in byte-level BPE.

    Printable Latin-1 bytes are their own characters, the others follow from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet
