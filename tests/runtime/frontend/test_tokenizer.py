"""Tokenizers of several kinds: encoding, templates, checks, decoding, and the queue of texts."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corun.runtime.engine.tokenizer import load_tokenizer, spec_of
from corun.runtime.errors import ContextLengthError, OverloadedError, RequestError
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.frontend.codec import PlainCodec, codec_from_spec, codec_of
from corun.runtime.frontend.tokenizer import TextQueue, Tokenizer, begin_flow, check_token_ids, token_bytes
from corun.runtime.limits import TextLimit, prompt_limit
from hypothesis import given
from hypothesis import strategies as st
from support.fake_core import BOS_ID, EOS_ID, save_tokenizer
from support.tokenizers import run_tokenizer

EMOJI = "😀"


def byte_fallback_tokenizer() -> Tokenizer:
    """Words with a leading mark, like SentencePiece's, and bytes for everything else."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "!", "a", "▁"]
    vocabulary = [(word, -1.0) for word in words]
    tokenizer = RustTokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    return Tokenizer(codec_of(fast))


class SlowTokenizer:
    """A tokenizer written in Python: the part of transformers' interface that is used."""

    is_fast = False
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS_ID] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: list[int], **options: Any) -> str:
        assert options["clean_up_tokenization_spaces"] is False
        return bytes(token for token in token_ids if token < BOS_ID).decode(errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"


def slow_tokenizer() -> Tokenizer:
    return Tokenizer(codec_of(SlowTokenizer()))


def told_tokenizer(path: str, chat_template: str | None = None) -> Tokenizer:
    """Make a tokenizer as a front end does for an engine in another process."""
    spec = spec_of(load_tokenizer(path))
    assert spec is not None
    return Tokenizer(codec_from_spec(spec, chat_template=chat_template))


@pytest.fixture(params=["bytes", "told", "fallback", "slow"])
def any_tokenizer(request: pytest.FixtureRequest, tokenizer: Tokenizer, tokenizer_dir: str) -> Tokenizer:
    if request.param == "bytes":
        return tokenizer
    if request.param == "told":
        return told_tokenizer(tokenizer_dir)
    return byte_fallback_tokenizer() if request.param == "fallback" else slow_tokenizer()


def stream_pieces(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> list[str]:
    stream = tokenizer.stream(prompt)
    return [stream.push(token_id) for token_id in token_ids]


def test_special_tokens_are_added_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab") == [BOS_ID, 97, 98]
    assert tokenizer.encode("<s>ab", add_special_tokens=False) == [BOS_ID, 97, 98]
    assert tokenizer.encode("") == [BOS_ID]


def test_long_and_short_texts_encode_alike_beside_the_loop(any_tokenizer: Tokenizer) -> None:
    texts = ["short", "Hello world! " * 2000]

    async def run() -> list[list[int]]:
        return [await any_tokenizer.encode_async(text) for text in texts]

    assert asyncio.run(run()) == [any_tokenizer.encode(text) for text in texts]
    any_tokenizer.close()


def test_the_event_loop_runs_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    async def run() -> int:
        encoding = asyncio.ensure_future(tokenizer.encode_async("some words " * 20_000))
        num_turns = 0
        while not encoding.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        return num_turns

    assert asyncio.run(run()) > 3
    tokenizer.close()


def encode(tokenizer: Tokenizer, text: str, limit: TextLimit, **options: bool) -> list[int]:
    return asyncio.run(tokenizer.encode_async(text, limit=limit, **options))


def test_a_long_text_with_too_many_tokens_is_refused(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLengthError, match=r"more than 511 tokens, .*--max-model-len"):
        encode(any_tokenizer, "Hello world! " * 20_000, prompt_limit(512))
    any_tokenizer.close()


def test_the_last_tokens_of_a_long_text(any_tokenizer: Tokenizer) -> None:
    text = "Hello world! " * 20_000
    for add_special_tokens in (True, False):
        whole = any_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        last = encode(any_tokenizer, text, prompt_limit(512, 100), add_special_tokens=add_special_tokens)
        assert last[-100:] == whole[-100:]
    any_tokenizer.close()


def test_a_long_text_that_fits_has_all_its_tokens() -> None:
    tokenizer = Tokenizer(PlainCodec(run_tokenizer(128), ChatTemplate(None, {})))
    text = "x" + " " * (128 * 500)
    assert encode(tokenizer, text, prompt_limit(512)) == tokenizer.encode(text)
    tokenizer.close()


def test_half_a_character_in_a_long_text_is_found(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"not valid Unicode: .* at character 40000"):
        encode(any_tokenizer, "a" * 40_000 + "\ud800" + "a" * 500_000, prompt_limit(60_000))
    any_tokenizer.close()


def test_what_tokenizers_written_in_python_cannot_cut_is_bounded() -> None:
    tokenizer = slow_tokenizer()
    with pytest.raises(RequestError, match=r"cannot be tokenized in parts.* at most 262144 "):
        encode(tokenizer, "a" * 300_000, prompt_limit(512, 5))
    assert encode(tokenizer, "a" * 99_000, prompt_limit(512, 5))[-5:] == [97] * 5
    tokenizer.close()


def test_long_lists_of_tokens_are_decoded_beside_the_loop(any_tokenizer: Tokenizer) -> None:
    token_ids = any_tokenizer.encode("Hello world! " * 400)

    async def run() -> tuple[str, list[str]]:
        return await any_tokenizer.decode_async(token_ids), await any_tokenizer.token_texts(token_ids)

    text, texts = asyncio.run(run())
    assert text == any_tokenizer.decode(token_ids, skip_special_tokens=False)
    assert texts == [any_tokenizer.token_text(one) for one in token_ids]
    any_tokenizer.close()


def test_text_that_is_no_unicode_is_refused(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"not valid Unicode.*character 1"):
        any_tokenizer.encode("a\ud800")


def test_chat_templates(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == "<user>Hi<assistant>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<user>Hi"
    with pytest.raises(RequestError, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])


def test_a_missing_chat_template_is_named(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="--chat-template"):
        told_tokenizer(path).apply_chat_template(messages)
    with pytest.raises(RequestError, match="--chat-template"):
        slow_tokenizer().apply_chat_template(messages)
    given_one = told_tokenizer(path, "{{ messages[0]['content'] }}!")
    assert given_one.apply_chat_template(messages) == "Hi!"
    broken = told_tokenizer(path, "{{ messages[0]['content'] + 1 }}")
    with pytest.raises(RequestError, match="refuses the messages"):
        broken.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("token_ids", "text"), [([1, 260], r"token 1 .* id 260.* 0 to 259"), ([-1], "id -1"), ([True], "True")]
)
def test_token_ids_outside_the_vocabulary(token_ids: list[int], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        check_token_ids(token_ids, vocab_size=260)


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_give_the_text_of_decoding_at_once(prompt: list[int], output: list[int]) -> None:
    tokenizer = slow_tokenizer()
    streamed = "".join(stream_pieces(tokenizer, [*prompt, 32], output))
    assert streamed.rstrip("\ufffd") == bytes(output).decode(errors="replace").rstrip("\ufffd")


@given(st.text(max_size=20), st.text(max_size=20))
def test_the_stream_equals_decoding_at_once(prompt: str, text: str) -> None:
    tokenizer = slow_tokenizer()
    pieces = stream_pieces(tokenizer, list(prompt.encode()), list(text.encode()))
    assert "".join(pieces).rstrip("\ufffd") == text.rstrip("\ufffd")
    assert all(piece in text for piece in pieces)


@pytest.mark.parametrize("text", ["é", "€ and €", EMOJI * 3, f"a{EMOJI}\n", "中文字" * 30], ids=range(5))
def test_characters_come_whole(any_tokenizer: Tokenizer, text: str) -> None:
    token_ids = any_tokenizer.encode("a" + text, add_special_tokens=False)[1:]
    if any_tokenizer.decode(token_ids[:1]) == "":  # the mark of a word's beginning
        token_ids = token_ids[1:]
    pieces = stream_pieces(any_tokenizer, any_tokenizer.encode("a"), token_ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == any_tokenizer.decode(token_ids)


def test_a_cut_character_is_left_out(any_tokenizer: Tokenizer) -> None:
    token_ids = any_tokenizer.encode("a" + EMOJI, add_special_tokens=False)
    assert "".join(stream_pieces(any_tokenizer, [], token_ids[:-1])).strip() == "a"


def test_a_character_may_begin_in_the_prompt(tokenizer: Tokenizer) -> None:
    raw = list(EMOJI.encode())
    assert stream_pieces(tokenizer, raw[:2], [*raw[2:], 33]) == ["", EMOJI, "!"]


def test_invalid_bytes_do_not_hold_text_back_for_ever(any_tokenizer: Tokenizer) -> None:
    (lead,) = any_tokenizer.encode("a" + EMOJI, add_special_tokens=False)[-1:]
    (letter,) = any_tokenizer.encode("a", add_special_tokens=False)[-1:]
    pieces = stream_pieces(any_tokenizer, [letter], [lead] * 200)
    assert len("".join(pieces)) >= 190
    assert set("".join(pieces)) == {"\ufffd"}


def test_leading_spaces_survive_after_a_prompt() -> None:
    tokenizer = byte_fallback_tokenizer()
    hello, world = tokenizer.encode("Hello world")
    assert stream_pieces(tokenizer, [hello], [world, world]) == [" world", " world"]
    assert stream_pieces(tokenizer, [], [hello, world]) == ["Hello", " world"]
    assert tokenizer.token_text(world) == " world"


def test_special_tokens_show_only_if_asked(tokenizer: Tokenizer) -> None:
    assert stream_pieces(tokenizer, [97], [98, EOS_ID, BOS_ID, 99]) == ["b", "", "", "c"]
    stream = tokenizer.stream([97], skip_special_tokens=False)
    assert [stream.push(token_id) for token_id in [98, EOS_ID]] == ["b", "</s>"]


def test_the_text_of_single_tokens(any_tokenizer: Tokenizer) -> None:
    letter, *emoji = any_tokenizer.encode("a" + EMOJI, add_special_tokens=False)[-5:]
    assert any_tokenizer.token_text(letter) == "a"
    assert any_tokenizer.token_text(emoji[0]) == "bytes:\\xf0"


def test_tokens_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    assert stream_pieces(tokenizer, [97], [259, 98]) == ["", "b"]
    assert tokenizer.token_text(259) == ""


def test_token_bytes() -> None:
    assert token_bytes("Ġa") == b" a"
    assert token_bytes("<0xE2>") == b"\xe2"
    assert token_bytes("▁word") is None
    assert token_bytes(None) is None


def test_token_ids_of_other_integer_types() -> None:
    checked = check_token_ids(np.array([1, 2], dtype=np.int32), vocab_size=3)  # type: ignore[arg-type]
    assert checked == [1, 2]
    assert {type(token_id) for token_id in checked} == {int}
    with pytest.raises(RequestError, match=r"token 1 of the prompt is 1\.5"):
        check_token_ids([0, 1.5], vocab_size=3)  # type: ignore[list-item]


SHORT, LONG = 100, 100_000


class Clock:
    """A clock that only ``Work`` advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Iterator[TextQueue]:
    queue = TextQueue(1000, clock)
    yield queue
    queue.close()


class Work:
    """Jobs that note their names when they run; those named "gate" wait until it opens."""

    def __init__(self, queue: TextQueue) -> None:
        self.queue = queue
        self.done: list[str] = []
        self.gate = threading.Event()

    async def run(self, name: str, num_chars: int, *, is_long: bool = False) -> str:
        def work() -> str:
            if name == "gate":
                assert self.gate.wait(20)
            self.done.append(name)
            return name

        return await self.queue.run(work, num_chars, is_long=is_long)


async def connection(work: Work, names: list[str], num_chars: int, is_long: bool = False) -> None:
    begin_flow()
    await asyncio.gather(*(work.run(name, num_chars, is_long=is_long) for name in names))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_connections_take_turns(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(connection(work, ["gate"], 1))
        await settle()
        many = asyncio.ensure_future(connection(work, ["a1", "a2", "a3", "a4"], 50))
        await settle()
        few = asyncio.ensure_future(connection(work, ["b1", "b2"], 50))
        await settle()
        work.gate.set()
        await asyncio.gather(gate, many, few)

    asyncio.run(run())
    assert work.done == ["gate", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_short_text_overtakes_the_pieces_of_a_longer_one(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(connection(work, ["gate"], 1))
        await settle()
        large = asyncio.ensure_future(connection(work, ["l1", "l2", "l3"], 900))
        await settle()
        small = asyncio.ensure_future(connection(work, ["s"], 100))
        await settle()
        work.gate.set()
        await asyncio.gather(gate, large, small)

    asyncio.run(run())
    assert work.done == ["gate", "s", "l1", "l2", "l3"]


def test_short_texts_do_not_wait_for_long_ones(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        long = asyncio.ensure_future(work.run("gate", LONG, is_long=True))
        await settle()
        assert await asyncio.wait_for(work.run("short", SHORT), 20) == "short"
        assert not long.done()
        work.gate.set()
        await long

    asyncio.run(run())


def refusal(queue: TextQueue, num_waiting: int) -> OverloadedError:
    """The error of a text that would wait behind ``num_waiting`` characters."""
    with queue.admitted(num_waiting):  # one text is served in any case
        with pytest.raises(OverloadedError) as caught, queue.admitted(num_waiting):
            pass
        return caught.value


def test_what_waits_is_bounded(queue: TextQueue) -> None:
    error = refusal(queue, 5000)
    assert error.status == 429
    assert "5000 characters of other prompts" in str(error)
    assert "exceed 1000 (--max-waiting-chars)" in str(error)
    assert error.retry_after_s == 1
    with queue.admitted(400), queue.admitted(600):
        pass


def test_long_texts_do_not_shut_short_ones_out(queue: TextQueue) -> None:
    with queue.admitted(LONG), queue.admitted(SHORT):
        pass
    with queue.admitted(1000), queue.admitted(LONG):
        pass


def test_a_refusal_says_when_what_waits_is_done(queue: TextQueue, clock: Clock) -> None:
    def slow() -> None:
        clock.now_s += 1.0

    async def run() -> None:
        for _ in range(40):
            await queue.run(slow, 50_000, is_long=False)

    asyncio.run(run())
    assert refusal(queue, 500_000).retry_after_s in (10, 11)
    assert refusal(queue, 10**12).retry_after_s == 3600


def test_work_of_clients_that_have_left_is_dropped(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(work.run("gate", SHORT))
        await settle()
        left = asyncio.ensure_future(work.run("left", SHORT))
        await settle()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        work.gate.set()
        await gate
        assert await work.run("next", SHORT) == "next"

    asyncio.run(run())
    assert work.done == ["gate", "next"]


def test_errors_pass_through(queue: TextQueue) -> None:
    def fails() -> None:
        raise ValueError("no")

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            await queue.run(fails, SHORT, is_long=False)

    asyncio.run(run())


def test_the_event_loop_does_little_itself(queue: TextQueue) -> None:
    async def run() -> None:
        taken = [queue.takes_on_loop(4096) for _ in range(6)]
        assert taken == [True] * 4 + [False] * 2
        await settle()
        assert queue.takes_on_loop(4096)

    asyncio.run(run())


def test_closing_cancels_what_waits(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(work.run("gate", SHORT))
        await settle()
        waiting = asyncio.ensure_future(work.run("never", SHORT))
        await settle()
        queue.close()
        queue.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        work.gate.set()
        await gate

    asyncio.run(run())
    assert work.done == ["gate"]


def test_a_text_that_fails_is_not_kept() -> None:
    class Text:
        pass

    def fail(text: Text) -> None:
        raise RequestError("refused")

    async def scene() -> None:
        queue = TextQueue(100)
        text = Text()
        kept = weakref.ref(text)
        work = partial(fail, text)
        with contextlib.suppress(RequestError):
            await queue.run(work, 1, is_long=False)
        del text, work
        while kept() is not None:  # the thread may not have returned yet
            await asyncio.sleep(0.01)
        queue.close()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scene(), 20))
    finally:
        gc.enable()
