"""Text to tokens and back, and the model's chat template, for the front ends.

Adds special tokens exactly once, checks texts and token ids, and tokenizes all but short texts in
threads so that the event loop never stalls. Knows nothing of requests or of the engine.

The queue of texts for the threads is bounded, and fair. Two threads do the work, one of them for
long texts only, so that short texts never wait for these. In each, connections take turns by the
characters that they have had (self-clocked fair queueing): a connection with many texts, or with a
long text in pieces, delays any other connection by one piece at most.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
import operator
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache, partial
from typing import Any, SupportsIndex, TypeVar

from ..errors import RequestError
from ..limits import TextLimit, check_waiting_chars, check_whole_text
from .chat_template import RENDER_ERRORS
from .codec import Codec
from .detokenizer import REPLACEMENT, Decoder, WindowStream
from .long_text import Span, TextPiece, is_long, long_text_tokens, num_worked_chars
from .special_stops import SpecialTokens

MAX_SHORT_CHARS = 32_768  # of a text that does not wait for longer ones
_MAX_LOOP_CHARS = 16_384  # of texts that one turn of the event loop tokenizes itself
_CHARS_PER_S = 1e6  # at first
_LEARNING_RATE = 0.2
_MIN_OBSERVED_CHARS = 1024
_MAX_RETRY_AFTER_S = 3600

_T = TypeVar("_T")


class _Flow:
    """The texts of one connection, which take turns with those of others."""

    __slots__ = ("finish",)

    def __init__(self) -> None:
        self.finish = 0.0  # virtual time at which its last job ends, in characters


_flow: ContextVar[_Flow] = ContextVar("_flow")


def begin_flow() -> None:
    """Texts of this context, and of contexts copied from it, take turns as one connection."""
    _flow.set(_Flow())


class _Waiting:
    """Characters of texts that are admitted and not yet done."""

    def __init__(self) -> None:
        self.num_chars = 0  # memory
        self.num_worked = 0  # those of them that are tokenized, not refused before


class _Job:
    __slots__ = ("future", "num_chars", "work")

    def __init__(self, work: Callable[[], Any], num_chars: int) -> None:
        self.work: Callable[[], Any] | None = work
        self.num_chars = num_chars
        self.future: Future[Any] = Future()


class _Thread:
    """One thread, and the jobs that wait for it, by virtual time of their end."""

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.jobs: list[tuple[float, int, _Job]] = []


class TextQueue:
    """Texts that wait to be tokenized, and the threads that do it."""

    def __init__(self, max_waiting_chars: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """``max_waiting_chars``: of all short texts, and of all long ones; one may have more."""
        self._clock = clock
        self._max_chars = max_waiting_chars
        self._waiting = _Waiting(), _Waiting()  # short and long texts: neither shuts the other out
        self._num_loop_chars = 0  # in this turn of the event loop
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._now = 0.0  # virtual time: the end of the job that began last
        self._threads: tuple[_Thread, _Thread] | None = None
        self._chars_per_s = _CHARS_PER_S

    def close(self) -> None:
        """Cancel what waits, and end the threads. Idempotent."""
        threads, self._threads = self._threads, None
        for thread in threads or ():
            thread.pool.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                jobs, thread.jobs = thread.jobs, []
            for _, _, job in jobs:
                job.future.cancel()

    def takes_on_loop(self, num_chars: int) -> bool:
        """Whether the event loop may tokenize a text itself; counts it if so."""
        if self._num_loop_chars == 0:
            asyncio.get_running_loop().call_soon(self._end_turn)
        if self._num_loop_chars + num_chars > _MAX_LOOP_CHARS:
            return False
        self._num_loop_chars += max(1, num_chars)
        return True

    def _end_turn(self) -> None:
        self._num_loop_chars = 0

    @contextlib.contextmanager
    def admitted(self, num_chars: int, num_worked: int | None = None) -> Iterator[None]:
        """Count a text as waiting. Raises ``OverloadedError`` if too much waits already.

        ``num_worked``: the characters that are probably tokenized; None = all.
        """
        waiting = self._waiting[num_chars > MAX_SHORT_CHARS]
        check_waiting_chars(
            waiting.num_chars,
            num_chars,
            max_waiting_chars=self._max_chars,
            retry_after_s=self._retry_after_s(waiting),
        )
        num_worked = num_chars if num_worked is None else num_worked
        waiting.num_chars += num_chars
        waiting.num_worked += num_worked
        try:
            yield
        finally:  # also if the client has left
            waiting.num_chars -= num_chars
            waiting.num_worked -= num_worked

    async def run(self, work: Callable[[], _T], num_chars: int, *, is_long: bool) -> _T:
        """Return the result of ``work``, which a thread calls when it is its turn.

        Cancellation removes work that has not begun.
        """
        job = _Job(work, num_chars)
        self._submit(job, is_long=is_long)
        try:
            result: _T = await asyncio.wrap_future(job.future)
            return result
        except asyncio.CancelledError:
            job.future.cancel()
            job.work = None  # it holds the text
            raise
        finally:
            del job  # an error's traceback has this frame: a cycle would keep the text

    def _submit(self, job: _Job, *, is_long: bool) -> None:
        if self._threads is None:
            self._threads = _Thread("corun-tokenizer"), _Thread("corun-tokenizer-long")
        thread = self._threads[is_long]
        flow = _flow.get(None) or _Flow()
        with self._lock:
            flow.finish = max(self._now, flow.finish) + job.num_chars
            heapq.heappush(thread.jobs, (flow.finish, next(self._numbers), job))
        thread.pool.submit(self._run_next, thread)

    def _run_next(self, thread: _Thread) -> None:
        """Run the next job of ``thread`` in its thread; it is called once for each."""
        with self._lock:
            if not thread.jobs:  # closed
                return
            finish, _, job = heapq.heappop(thread.jobs)
            self._now = max(self._now, finish)
        work = job.work  # read first: cancellation removes it
        if not job.future.set_running_or_notify_cancel():
            return
        num_chars, began_s = job.num_chars, self._clock()
        try:
            assert work is not None
            job.future.set_result(work())
        except BaseException as error:
            job.future.set_exception(error)
        del job, work  # as in ``run``
        self._observe(num_chars, self._clock() - began_s)

    def _observe(self, num_chars: int, took_s: float) -> None:
        if num_chars >= _MIN_OBSERVED_CHARS:
            rate = num_chars / max(took_s, 1e-6)
            self._chars_per_s += _LEARNING_RATE * (rate - self._chars_per_s)

    def _retry_after_s(self, waiting: _Waiting) -> int:
        """Seconds until all that waits is done, at the rate of the last texts."""
        seconds = math.ceil(waiting.num_worked / self._chars_per_s)
        return min(max(1, seconds), _MAX_RETRY_AFTER_S)


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
