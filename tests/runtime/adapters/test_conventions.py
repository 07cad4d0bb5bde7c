"""The meaning of the files beside an adapter's weights."""

import json
from typing import Any

import pytest
from corun.runtime.adapters.conventions import (
    NO_CONVENTIONS,
    AdapterConventions,
    ConventionContents,
    conventions_of,
)
from corun.runtime.adapters.vocabulary import AddedToken, BaseTokens, TokenDifferences

BASE = BaseTokens({"a": 0, "</s>": 1, "<end>": 2, "<other>": 3}, frozenset({"</s>", "<end>"}), 1, 8)
DECODER: dict[str, Any] = {"added_tokens_decoder": {"1": {"content": "</s>", "special": True}}}


def read(
    template: str | None = None, *, tokenizer: TokenDifferences | None = None, **files: Any
) -> tuple[AdapterConventions, list[str]]:
    names = """
        processor_template tokenizer_config special_tokens_map added_tokens generation_config
    """.split()
    contents = ConventionContents(template=template, **{name: files.pop(name, {}) for name in names})
    assert not files
    return conventions_of(contents, tokenizer or TokenDifferences(), BASE)


def test_no_files_are_the_conventions_of_the_base() -> None:
    assert read() == (NO_CONVENTIONS, [])
    assert NO_CONVENTIONS.digest == ""


def test_the_digest_names_what_is_in_the_files() -> None:
    one, same, other = (read(text)[0] for text in ("one", "one", "other"))
    assert one == same and one.digest
    assert one.digest != other.digest
    of_field = read(tokenizer_config={"chat_template": "one"})[0]
    assert of_field == one


def test_a_file_of_its_own_goes_before_a_field() -> None:
    config = {"chat_template": "of the field"}
    assert read("of the file", tokenizer_config=config)[0].template == "of the file"
    assert read(tokenizer_config=config)[0].template == "of the field"
    by_name = {"chat_template": [{"name": "default", "template": "x"}]}
    assert read(tokenizer_config=by_name)[0].template == {"default": "x"}


def test_the_response_template_is_a_field_of_the_tokenizer() -> None:
    described = {"start_anchor": "x", "fields": {"content": {}}}
    found = read(tokenizer_config={"response_template": described})[0]
    assert json.loads(found.response_template or "") == described
    assert found.template is None and found.digest
    with pytest.raises(ValueError, match="the response_template of tokenizer_config"):
        read(tokenizer_config={"response_template": "x" * 1048577})


def test_the_template_of_a_processor_is_the_last_that_is_taken() -> None:
    processor = {"chat_template": "of the processor"}
    assert read(processor_template=processor)[0].template == "of the processor"
    config = {"chat_template": "of the tokenizer"}
    assert read(processor_template=processor, tokenizer_config=config)[0].template == ("of the tokenizer")
    with pytest.raises(ValueError, match=r"chat_template in chat_template\.json"):
        read(processor_template={"chat_template": 3})


@pytest.mark.parametrize(
    "token", ["<end>", {"content": "<end>", "lstrip": False}, ["<end>"], [{"content": "<end>"}]]
)
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_end_token_of_its_tokenizer_ends_its_answers(file: str, token: Any) -> None:
    files: dict[str, Any] = {file: {"eos_token": token}}
    found, notes = read(**files)
    assert (found.eos_token_ids, notes) == ((2,), [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [(2, (2,)), ([3, 2], (3, 2)), (None, ()), ([1], ()), ([2, -1, 8, 10**9], (2,)), ([2, 2], (2,))],
)
def test_end_tokens_of_the_generation_config(given: Any, expected: tuple[int, ...]) -> None:
    found, _ = read(generation_config={"eos_token_id": given, "temperature": 0.7})
    assert found.eos_token_ids == expected


def test_all_end_tokens_count_together() -> None:
    found, _ = read(
        tokenizer_config={"eos_token": "<end>"},
        special_tokens_map={"eos_token": "</s>"},
        generation_config={"eos_token_id": [3]},
    )
    assert found.eos_token_ids == (2, 3)  # </s> ends answers of the base


@pytest.mark.parametrize("token", ["two tokens", "<far>"])
def test_an_end_token_that_the_base_cannot_say_is_told_once_and_not_used(token: str) -> None:
    far = TokenDifferences((AddedToken("<far>", 8),))
    found, notes = read(
        tokenizer=far,
        tokenizer_config={"eos_token": token},
        special_tokens_map={"eos_token": token},
        generation_config={"eos_token_id": 2},
    )
    assert found.eos_token_ids == (2,)
    (note,) = notes
    assert repr(token) in note and "ends no answer" in note


def test_an_added_token_with_an_embedding_can_end_answers() -> None:
    near = TokenDifferences((AddedToken("<near>", 7),))
    found, notes = read(tokenizer=near, tokenizer_config={"eos_token": "<near>"})
    assert (found.eos_token_ids, found.tokens, notes) == ((7,), near, [])


def test_special_tokens_come_from_the_file_that_transformers_takes_them_from() -> None:
    files: dict[str, Any] = {"special_tokens_map": {"eos_token": "<end>", "bos_token": None}}
    config = {"eos_token": "</s>", "pad_token": {"content": "a"}}
    found, _ = read("x", tokenizer_config=config, **files)
    assert found.special_tokens == {"eos_token": "<end>", "bos_token": None, "pad_token": "a"}
    found, _ = read("x", tokenizer_config=config | DECODER, **files)
    assert found.special_tokens["eos_token"] == "</s>"
    assert read(tokenizer_config=config)[0].special_tokens == {}  # no template names them


def test_tokens_that_are_listed_beside_the_tokenizer_count() -> None:
    config = {"added_tokens_decoder": {"5": {"content": "<new>", "special": True}}}
    found, _ = read(tokenizer_config=config, added_tokens={"<old>": 6})
    new, old = AddedToken("<new>", 5, special=True), AddedToken("<old>", 6)
    assert found.tokens == TokenDifferences((new, old))
    listed = read(tokenizer=TokenDifferences((new,), (1, 2)), tokenizer_config=DECODER)[0]
    assert listed.tokens == TokenDifferences((new,), (2,))  # 1 is written beside


def test_another_tokenizer_refuses_conversations_that_its_template_would_write() -> None:
    config = {"added_tokens_decoder": {"1": {"content": "<x>"}}, "eos_token": "<end>"}
    found, (note,) = read("x", tokenizer_config=config)
    assert found.refusal is not None
    assert "id 1 is token '<x>', but token '</s>' in the base" in found.refusal
    assert (found.template, found.eos_token_ids) == (None, ())
    assert found.refusal in note
    assert read(tokenizer_config=config)[0] == NO_CONVENTIONS  # no template but the base's


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template in tokenizer_config.json"),
        ({"tokenizer_config": {"chat_template": [{}]}}, "chat_template in tokenizer_config.json"),
        ({"tokenizer_config": {"chat_template": "x" * 1048577}}, "has 1048577 bytes"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5"),
        ({"special_tokens_map": {"eos_token": {"content": None}}}, "eos_token"),
        ({"added_tokens": {"<x>": "y"}}, "'<x>' in added_tokens.json"),
        ({"added_tokens": {"<x>": -1}}, "'<x>' in added_tokens.json"),
        ({"added_tokens": {"<x>": 2**31}}, "'<x>' in added_tokens.json"),
        ({"added_tokens": {"<x>": 10**30}}, "'<x>' in added_tokens.json"),
        ({"generation_config": {"eos_token_id": "x"}}, "eos_token_id in generation_config.json"),
        ({"generation_config": {"eos_token_id": [True]}}, "eos_token_id"),
    ],
)
def test_contents_that_are_none_are_named(files: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**files)
