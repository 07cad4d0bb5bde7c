"""Whether an adapter's tokenizer makes the base's tokens."""

from collections.abc import Mapping

import pytest
from corun.runtime.adapters.vocabulary import AddedToken, BaseTokens, TokenDifferences, compare

BASE = BaseTokens({"a": 0, "b": 1, "</s>": 2, "<tool>": 3}, frozenset({"</s>", "<tool>"}), 2, 8)
WORDS = {"a": 0, "b": 1}
ADDED = (AddedToken("</s>", 2, special=True), AddedToken("<tool>", 3))
PAD = AddedToken("<pad>", 4, special=True)


def test_the_same_tokens_differ_in_nothing() -> None:
    assert compare(WORDS, ADDED, BASE) == TokenDifferences()
    assert compare({**WORDS, "</s>": 2, "<tool>": 3}, ADDED, BASE) == TokenDifferences()
    assert compare(None, (), BASE) == TokenDifferences()


def test_added_tokens_are_told_by_ascending_id() -> None:
    late = AddedToken("<late>", 99)
    assert compare(WORDS, (*ADDED, late, PAD), BASE) == TokenDifferences((PAD, late))
    assert compare(None, (PAD,), BASE) == TokenDifferences((PAD,))
    assert compare(None, (PAD, AddedToken("", 5)), BASE) == TokenDifferences((PAD,))


def test_a_word_of_the_base_that_is_found_in_texts_is_an_added_token() -> None:
    whole = AddedToken("b", 1)
    assert compare(WORDS, (*ADDED, whole), BASE) == TokenDifferences((whole,))


def test_added_tokens_of_the_base_that_are_missing_are_told() -> None:
    assert compare(WORDS, ADDED[:1], BASE) == TokenDifferences(missing_ids=(3,))


@pytest.mark.parametrize(
    ("words", "added", "reason"),
    [
        ({"a": 1, "b": 0}, ADDED, "token 'a' has id 1, but id 0 in the base"),
        (WORDS, (*ADDED, AddedToken("<x>", 1)), "id 1 is token '<x>', but token 'b' in the base"),
        ({**WORDS, "ab": 4}, ADDED, "the base has no token 'ab' (id 4)"),
        ({"a": 0}, ADDED, "the base's token 'b' is missing"),
        (WORDS, [AddedToken(f"<{i}>", 100 + i) for i in range(1025)], "it adds 1025 tokens"),
        ({**WORDS, "x" * 1000: 4}, ADDED, "'" + "x" * 60 + "…'"),
    ],
)
def test_other_tokens_are_a_reason(
    words: Mapping[str, int], added: tuple[AddedToken, ...], reason: str
) -> None:
    found = compare(words, added, BASE)
    assert found.reason is not None and reason in found.reason
    assert not found.added and not found.missing_ids
