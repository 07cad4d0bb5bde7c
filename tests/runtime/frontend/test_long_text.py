"""Long texts have the same tokens in windows as at once, and are refused as soon as is known."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from corun.runtime.errors import ContextLengthError, RequestError
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.frontend.codec import Codec, PlainCodec
from corun.runtime.frontend.long_text import TextPiece, is_long, long_text_tokens
from corun.runtime.limits import TextLimit, prompt_limit
from support.tokenizers import SAMPLE_KINDS, WORDS, run_tokenizer, save_sample_tokenizer

WINDOW = 32_768
MAX_MODEL_LEN = 131_072
NO_TOKENS: tuple[list[int], list[int]] = ([], [])


class Steps:
    """Runs the steps of one text, and counts the characters that are tokenized."""

    def __init__(
        self,
        codec: Codec,
        text: str,
        limit: TextLimit,
        *,
        with_starts: bool = True,
        around: tuple[list[int], list[int]] | None = NO_TOKENS,
    ) -> None:
        self.num_chars = 0
        self.tokens: list[int] | None = None
        steps = long_text_tokens(len(text), limit, around)
        try:
            span = next(steps)
            while True:
                assert 0 < span[1] - span[0] <= WINDOW
                self.num_chars += span[1] - span[0]
                piece = codec.encode_piece(text[slice(*span)])
                span = steps.send(piece if with_starts else TextPiece(piece.token_ids, None))
        except StopIteration as done:
            self.tokens = done.value


@pytest.fixture(scope="module")
def runs() -> PlainCodec:
    """A byte-level vocabulary with tokens of 2, 4, ... 128 spaces."""
    return PlainCodec(run_tokenizer(128), ChatTemplate(None, {}))


@pytest.fixture(params=sorted(SAMPLE_KINDS))
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> PlainCodec:
    save_sample_tokenizer(request.param, tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    return PlainCodec(backend, ChatTemplate(None, {}))


def prose(seed: int, num_chars: int) -> str:
    rng = random.Random(seed)
    ends = (" ", " ", " ", ", ", ".\n", "  ", "\n\n", "\t", " 3.14 ", "…")
    words: list[str] = []
    length = 0
    while length < num_chars:
        words.append(rng.choice(WORDS) + rng.choice(ends))
        length += len(words[-1])
    return "".join(words)[:num_chars]


def spaces(num_tokens: int) -> str:
    return " " * (128 * num_tokens)


def whole(codec: Codec, text: str) -> list[int]:
    return codec.encode(text, add_special_tokens=False)


def test_texts_of_any_kind_have_the_same_tokens_in_windows(sample: PlainCodec) -> None:
    limit = TextLimit(10**6, RuntimeError)  # type: ignore[arg-type]
    for seed, num_chars in enumerate((WINDOW + 1, 3 * WINDOW, 150_000)):
        text = prose(seed, num_chars)
        assert Steps(sample, text, limit).tokens == whole(sample, text)


@pytest.mark.parametrize(
    "text_of",
    [
        lambda: spaces(2000),
        lambda: "x" + spaces(2000) + " " * 77,
        lambda: "".join(f"{'a' * (n % 7)}{spaces(n % 5)}{' ' * (n % 97)}" for n in range(900)),
        lambda: "中文€é😀" * 20_000,
        lambda: "\n" * 150_000,
    ],
    ids=["spaces", "a cut run", "many runs", "wide characters", "lines"],
)
def test_texts_without_words_have_the_same_tokens(runs: PlainCodec, text_of: Callable[[], str]) -> None:
    text = text_of()
    limit = TextLimit(10**6, RuntimeError)  # type: ignore[arg-type]
    assert Steps(runs, text, limit).tokens == whole(runs, text)


def test_a_text_of_many_characters_fits_by_its_tokens(runs: PlainCodec) -> None:
    limit = prompt_limit(1025)
    text = spaces(1024)
    assert is_long(len(text), limit)
    tokens = Steps(runs, text, limit).tokens
    assert tokens == whole(runs, text) and len(tokens) == 1024
    with pytest.raises(ContextLengthError, match=r"more than 1024 tokens.*--max-model-len"):
        Steps(runs, spaces(1025), limit)


def test_special_tokens_count(runs: PlainCodec) -> None:
    text, limit = spaces(1024), prompt_limit(1027)
    tokens = Steps(runs, text, limit, around=([7], [8])).tokens
    assert tokens == [7, *whole(runs, text), 8]
    with pytest.raises(ContextLengthError):
        Steps(runs, text, prompt_limit(1026), around=([7], [8]))


def test_work_is_bounded_by_the_limit_and_not_by_the_text(runs: PlainCodec) -> None:
    """A letter is a token here, so that a text is refused after as many characters."""
    done: list[int] = []

    def encode_piece(text: str) -> TextPiece:
        done.append(len(text))
        return TextPiece([1] * len(text), list(range(len(text))))

    limit = prompt_limit(MAX_MODEL_LEN)
    steps = long_text_tokens(1 << 25, limit, NO_TOKENS)

    def run() -> None:
        span = next(steps)
        while True:
            span = steps.send(encode_piece("x" * (span[1] - span[0])))

    with pytest.raises(ContextLengthError):
        run()
    assert sum(done) < 1.3 * MAX_MODEL_LEN + 2 * WINDOW
    assert not is_long(8 * (MAX_MODEL_LEN - 1), limit)
    assert is_long(8 * MAX_MODEL_LEN, limit)


def test_a_tokenizer_that_does_not_say_where_tokens_begin_is_counted(runs: PlainCodec) -> None:
    limit = prompt_limit(2000)
    text = prose(1, 200_000)
    with pytest.raises(ContextLengthError):
        Steps(runs, text, limit, with_starts=False)
    fits = Steps(runs, spaces(1500), limit, with_starts=False)
    assert fits.tokens is None, "it is tokenized at once"
    assert fits.num_chars == 1500 * 128
    assert Steps(runs, spaces(1500), limit, around=None).tokens is None
    with pytest.raises(ContextLengthError):
        Steps(runs, text, limit, around=None)


def test_windows_that_never_agree_are_counted() -> None:
    """As numbers that are grouped from their end."""
    limit = prompt_limit(9000)

    def run(num_chars: int) -> list[int] | None:
        steps = long_text_tokens(num_chars, limit, NO_TOKENS)
        span = next(steps)
        try:
            while True:
                length = span[1] - span[0]
                starts = list(range(0, length, 10))
                span = steps.send(TextPiece([span[1]] * len(starts), starts))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    assert run(80_000) is None
    with pytest.raises(ContextLengthError):
        run(200_000)


@pytest.mark.parametrize("num_kept", [1, 100, 3000])
def test_the_last_tokens_of_a_long_text(sample: PlainCodec, num_kept: int) -> None:
    text = prose(3, 400_000)
    steps = Steps(sample, text, prompt_limit(4096, num_kept))
    assert steps.tokens == whole(sample, text)[-num_kept:]
    assert steps.num_chars < 8 * num_kept + 8 * WINDOW, "it depends on the text's length"


def test_the_last_tokens_keep_special_ones(runs: PlainCodec) -> None:
    text = prose(4, 200_000)
    tokens = Steps(runs, text, prompt_limit(4096, 100), around=([7], [8])).tokens
    assert tokens is not None
    assert tokens[-100:] == [*whole(runs, text), 8][-100:]


def test_more_kept_tokens_than_fit_are_no_truncation(runs: PlainCodec) -> None:
    with pytest.raises(ContextLengthError):
        Steps(runs, prose(5, 200_000), prompt_limit(4096, 10**9))


def test_the_last_tokens_of_a_text_without_structure(runs: PlainCodec) -> None:
    """Where a run of spaces begins decides about its tokens: all of it is tokenized."""
    text = "x" * 5 + spaces(1900) + " " * 3
    steps = Steps(runs, text, prompt_limit(4096, 50))
    assert steps.tokens == whole(runs, text)[-50:]
    with pytest.raises(RequestError, match=r"384000 characters .* at most 262144 characters"):
        Steps(runs, spaces(3000), prompt_limit(4096, 50))
