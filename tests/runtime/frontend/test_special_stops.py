"""Stop strings with special tokens, which the shown text omits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.adapters.vocabulary import AddedToken as AddedAdapterToken
from corun.runtime.adapters.vocabulary import TokenDifferences
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.frontend.adapter_conventions import with_added
from corun.runtime.frontend.codec import Codec, codec_from_spec, codec_of
from corun.runtime.frontend.generation import Choice
from corun.runtime.frontend.tokenizer import Tokenizer
from corun.runtime.plan import RequestId
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.events import RequestUpdate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tokenizers import SAMPLE_KINDS, save_sample_tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

END, START, EATER, MARK = 300, 301, 302, 303
NAMES = {END: "<|im_end|>", START: "<|im_start|>", EATER: "<|eat|>", MARK: "<|mark|>"}


def byte_codec() -> Codec:
    """Token ids are bytes; ``EATER`` includes white space beside it, ``MARK`` is not special."""
    letters = {
        name: index
        for index, name in enumerate(
            [chr(byte) if 0x21 <= byte < 0x7F else f"<0x{byte:02X}>" for byte in range(256)]
        )
    }
    unused = {f"<unused{number}>": number for number in range(256, END)}
    vocab = letters | unused | {name: token_id for token_id, name in NAMES.items()}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([NAMES[END], NAMES[START]])
    tokenizer.add_special_tokens([AddedToken(NAMES[EATER], lstrip=True, rstrip=True)])
    tokenizer.add_tokens([NAMES[MARK]])
    return codec_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=NAMES[END]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_codec())


def ids(*parts: str | int) -> list[int]:
    """Return tokens of texts, as bytes, and of single special tokens."""
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else part.encode()
    return tokens


class Shown:
    """The shown text of a choice, token by token."""

    def __init__(
        self, tokenizer: Tokenizer, tokens: Sequence[int], end_id: int | None = None, **params: Any
    ) -> None:
        """``end_id``: the token at which the engine ends the choice."""
        self.choice = Choice(0, tokenizer, ids("prompt"), SamplingParams(max_tokens=99, **params))
        self.pieces: list[str] = []
        self.can_stop_engine = False
        for position, token_id in enumerate(tokens):
            reason = "length" if position == len(tokens) - 1 else None
            is_end = token_id == end_id
            update = RequestUpdate(
                RequestId(0),
                (token_id,),
                finish_reason="stop" if is_end else reason,
                stop_token_id=token_id if is_end else None,
            )
            self.can_stop_engine = self.choice.update(update)
            output = self.choice.output()
            self.pieces.append(output.new_text)
            if self.choice.has_ended:
                break
        self.end = (output.text, output.finish_reason, output.stop_reason)
        self.token_ids = output.token_ids
        assert "".join(self.pieces) == output.text


def spelled(tokens: Sequence[int]) -> str:
    return "".join(NAMES.get(token_id) or chr(token_id) for token_id in tokens)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stops", "tokens", "text", "stop"),
    [
        (["<|im_end|>"], ["ab", END, "cd"], "ab", "<|im_end|>"),
        (["<|im_end|>"], [END, "cd"], "", "<|im_end|>"),
        (["\n<|im_end|>"], ["ab\n", END, "cd"], "ab", "\n<|im_end|>"),
        (["<|im_end|>\n"], ["ab", END, "\ncd"], "ab", "<|im_end|>\n"),
        (["b<|im_end|>\nc"], ["ab", END, "\ncd"], "a", "b<|im_end|>\nc"),
        (["<|im_end|><|im_start|>"], ["ab", END, START], "ab", "<|im_end|><|im_start|>"),
        (["<|im_end|><|im_end|>"], ["ab", END, END], "ab", "<|im_end|><|im_end|>"),
        (["<|im_end|>\n<|im_start|>"], ["a", END, "\n", START], "a", "<|im_end|>\n<|im_start|>"),
        (["never", "<|im_end|>", "z"], ["ab", END, "z"], "ab", "<|im_end|>"),
        (["<|im_end|>c", "b<|im_end|>cd"], ["ab", END, "cd"], "ab", "<|im_end|>c"),
        (["<|im_end|>", "b<|im_end|>"], ["ab", END, "cd"], "a", "b<|im_end|>"),
        (["<|im_end|>", "b"], ["ab", END, "cd"], "a", "b"),
        # A model learns and writes a token that includes white space without that white space.
        (["<|eat|>\n"], ["ab", EATER, "cd"], "ab", "<|eat|>\n"),
        (["<|eat|>\n"], ["ab", EATER, "\ncd"], "ab", "<|eat|>\n"),
        ([" <|eat|>"], ["ab", EATER, "cd"], "ab", " <|eat|>"),
        ([" <|eat|>"], ["ab ", EATER, "cd"], "ab", " <|eat|>"),
        # An added token that is not special has text in any case.
        (["<|mark|>"], ["ab", MARK, "cd"], "ab", "<|mark|>"),
        # The same characters without the token are text that must not be shown either.
        (["<|im_end|>"], ["ab<|im_end|>cd"], "ab", "<|im_end|>"),
        (["<|im_end|><|im_start|>"], ["a<|im_end|>", START, "b"], "a", "<|im_end|><|im_start|>"),
        # Bytes of one character, with a special token among them.
        (["é<|im_end|>"], ["aé", END, "b"], "a", "é<|im_end|>"),
    ],
)
def test_a_special_token_stops_the_answer(
    tokenizer: Tokenizer, stops: list[str], tokens: list[str | int], text: str, stop: str, skip: bool
) -> None:
    shown = Shown(tokenizer, ids(*tokens), stop=stops, skip_special_tokens=skip)
    assert shown.end == (text, "stop", stop)
    assert shown.token_ids == ids(*tokens)[: len(shown.token_ids)]


@pytest.mark.parametrize(
    ("stop", "tokens", "skipped", "kept"),
    [
        ("<|im_end|>\n", ["ab", END, "x"], "abx", "ab<|im_end|>x"),
        ("<|im_end|>\n", ["ab", END, START, "\n"], "ab\n", "ab<|im_end|><|im_start|>\n"),
        ("\n<|im_end|>", ["ab", END, "\n"], "ab\n", "ab<|im_end|>\n"),
        ("<|im_end|>", ["<|im_end"], "<|im_end", "<|im_end"),
        ("<|im_end|>", [START, "|im_end|>"], "|im_end|>", "<|im_start|>|im_end|>"),
        ("\n\n<|im_end|>", ["ab\n", END], "ab\n", "ab\n<|im_end|>"),
    ],
)
def test_near_misses_are_shown_in_the_end(
    tokenizer: Tokenizer, stop: str, tokens: list[str | int], skipped: str, kept: str
) -> None:
    shown = Shown(tokenizer, ids(*tokens), stop=stop)
    assert shown.end == (skipped, "length", None)
    shown = Shown(tokenizer, ids(*tokens), stop=stop, skip_special_tokens=False)
    assert shown.end == (kept, "length", None)


def test_a_text_around_a_token_that_is_left_out_stops_as_before(tokenizer: Tokenizer) -> None:
    shown = Shown(tokenizer, ids("ab", END, "cd"), stop=["bc", "<|im_start|>"])
    assert shown.end == ("a", "stop", "bc")
    shown = Shown(tokenizer, ids("a<|im_", START, "end|>d"), stop=["<|im_end|>"])
    assert shown.end == ("a", "stop", "<|im_end|>")
    kept = Shown(
        tokenizer, ids("ab", END, "cd"), stop=["bc", "<|im_start|>"], include_stop_str_in_output=True
    )
    assert kept.end == ("abc", "stop", "bc")


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_that_is_kept_is_kept_whole(tokenizer: Tokenizer, skip: bool) -> None:
    options: dict[str, Any] = {"include_stop_str_in_output": True, "skip_special_tokens": skip}
    shown = Shown(tokenizer, ids("ab\n", END, "c"), stop=["\n<|im_end|>"], **options)
    assert shown.end == ("ab\n<|im_end|>", "stop", "\n<|im_end|>")
    shown = Shown(tokenizer, ids("ab", END, "c"), END, stop=["<|im_end|>"], **options)
    assert shown.end == ("ab<|im_end|>", "stop", "<|im_end|>")


@pytest.mark.parametrize("skip", [True, False])
def test_min_tokens(tokenizer: Tokenizer, skip: bool) -> None:
    tokens = ids("a", END, "b", END, "c")
    options: dict[str, Any] = {"stop": ["<|im_end|>"], "skip_special_tokens": skip}
    between = "" if skip else "<|im_end|>"
    assert Shown(tokenizer, tokens, min_tokens=2, **options).end == ("a", "stop", "<|im_end|>")
    later = Shown(tokenizer, tokens, min_tokens=3, **options)
    assert later.end == (f"a{between}b", "stop", "<|im_end|>")
    never = Shown(tokenizer, tokens, min_tokens=5, **options)
    assert never.end == (f"a{between}b{between}c", "length", None)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "end"),
    [
        ("<|im_end|>", ("ab\n", "stop", "<|im_end|>")),
        ("\n<|im_end|>", ("ab", "stop", "\n<|im_end|>")),
        ("<|im_end|>\n", ("ab\n", "stop", None)),
        ("b\n<|im_start|>", ("ab\n", "stop", None)),
    ],
)
def test_the_token_that_ends_the_sequence_may_complete_a_stop_string(
    tokenizer: Tokenizer, stop: str, end: tuple[str, str, str | None], skip: bool
) -> None:
    shown = Shown(tokenizer, ids("ab\n", END), END, stop=stop, skip_special_tokens=skip)
    assert shown.end == end
    assert shown.token_ids == ids("ab\n", END)
    assert not shown.can_stop_engine


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        ("<|tool|>", ["ab", 350, "c"], "ab"),
        ("b<|tool|>\n", ["ab", 350, "\nc"], "a"),
        ("<|tool|><|im_end|>", ["ab", 350, END], "ab"),
        ("<content>", ["ab", 351, "c"], "ab"),
    ],
)
def test_tokens_that_an_adapter_adds(stop: str, tokens: list[str | int], text: str, skip: bool) -> None:
    added = (AddedAdapterToken("<|tool|>", 350, special=True), AddedAdapterToken("<content>", 351))
    tokenizer = Tokenizer(with_added(byte_codec(), TokenDifferences(added), 400))
    shown = Shown(tokenizer, ids(*tokens), stop=stop, skip_special_tokens=skip)
    assert shown.end == (text, "stop", stop)


def test_a_stop_frees_the_engine_and_counts_its_token(tokenizer: Tokenizer) -> None:
    shown = Shown(tokenizer, ids("ab", END, "cd"), stop="<|im_end|>")
    assert shown.can_stop_engine
    assert shown.token_ids == ids("ab", END)


@given(
    st.lists(st.sampled_from(ids("xy", END, START)), min_size=1, max_size=12),
    st.lists(
        st.lists(st.sampled_from(ids("xy", END, START)), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    st.booleans(),
    st.booleans(),
)
@example(ids("x", END, "x"), [ids("xx")], True, True)
@example(ids("x", END, "x"), [ids("xx"), [START]], True, True)
@settings(max_examples=500)
def test_streams_are_the_whole_text_cut(
    tokens: list[int], stops: list[list[int]], skip: bool, include: bool
) -> None:
    shown = Shown(
        _TOKENIZER,
        tokens,
        stop=[spelled(one) for one in stops],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )
    expected = _expected(tokens, stops, skip=skip, include=include)
    assert shown.end == expected
    for number in range(len(shown.pieces)):  # no piece of a stop string is ever shown
        assert expected[0].startswith("".join(shown.pieces[:number]))


_TOKENIZER = Tokenizer(byte_codec())


def _expected(
    tokens: list[int], stops: list[list[int]], *, skip: bool, include: bool
) -> tuple[str, str, str | None]:
    """Cut whole sequences of tokens; stops without special tokens ignore skipped ones."""

    def text(of: Sequence[int]) -> str:
        return "".join("" if skip and one in NAMES else spelled([one]) for one in of)

    for end in range(1, len(tokens) + 1):
        matches = []
        for stop in stops:
            is_plain = skip and not any(one in NAMES for one in stop)
            seen = [at for at in range(end) if not (is_plain and tokens[at] in NAMES)]
            if seen[-1:] != [end - 1] or [tokens[at] for at in seen[-len(stop) :]] != stop:
                continue
            matches.append((seen[-len(stop)], is_plain, spelled(stop)))
        if matches:
            start, is_plain, found = min(matches)
            kept = text(tokens[start:end]) if is_plain else spelled(tokens[start:end])
            return text(tokens[:start]) + kept * include, "stop", found
    return text(tokens), "length", None


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", SAMPLE_KINDS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_tokenizers_of_all_kinds(tmp_path: Path, kind: str, skip: bool, is_plain: bool) -> None:
    save_sample_tokenizer(kind, tmp_path)
    hf = load_tokenizer(str(tmp_path))
    end = hf.eos_token or hf.sep_token
    end_id = hf.convert_tokens_to_ids(end)
    if is_plain:
        from corun.runtime.engine.tokenizer import spec_of

        spec = spec_of(hf)
        assert spec is not None
        codec: Codec = codec_from_spec(spec)
    else:
        from corun.runtime.frontend.codec import TransformersCodec

        codec = TransformersCodec(hf)
    tokenizer = Tokenizer(codec)
    words = tokenizer.encode("hello the tokens", add_special_tokens=False)
    for tokens, stop in (
        ([*words, end_id, *words], end),
        ([*words, end_id, *words], f"tokens{end}"),
        ([*words, end_id, end_id, *words], f"{end}{end}"),
    ):
        shown = Shown(tokenizer, tokens, stop=[stop, "never"], skip_special_tokens=skip)
        whole = "hello the tokens"
        text, reason, found = shown.end
        assert text.strip() == (whole.removesuffix("tokens").strip() if "t" in stop else whole)
        assert (reason, found) == ("stop", stop)


@pytest.mark.parametrize("kind", SAMPLE_KINDS)
def test_a_blank_that_the_decoder_drops_from_the_first_text(tmp_path: Path, kind: str) -> None:
    save_sample_tokenizer(kind, tmp_path)
    hf = load_tokenizer(str(tmp_path))
    end = hf.eos_token or hf.sep_token
    end_id = hf.convert_tokens_to_ids(end)
    tokenizer = Tokenizer(codec_of(hf))
    words = tokenizer.encode("hello the tokens", add_special_tokens=False)
    written = "".join(map(tokenizer.token_text, words))  # after another token
    for stop in (f"{end}{written}", f"{written}{end}", f"{end} hello"):
        answer = [end_id, *words, end_id]
        choice = Choice(0, tokenizer, [end_id] * 9, SamplingParams(max_tokens=99, stop=(stop,)))
        choice.update(RequestUpdate(RequestId(0), tuple(answer), finish_reason="length"))
        is_there = stop in f"{end}{written}{end}"
        expected = ("", "stop", stop) if is_there else (written.lstrip(), "length", None)
        output = choice.output()
        assert (output.text, output.finish_reason, output.stop_reason) == expected
