"""The files beside an adapter's weights are read once, with limits, and faults are reported."""

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from corun.runtime.adapters import convention_files
from corun.runtime.adapters.convention_files import ConventionReader, settled_stamps_of, stamps_of
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.vocabulary import BaseTokens
from corun.runtime.demo import demo_model_path
from support.residue import open_descriptors
from transformers import AutoTokenizer

BASE_TOKENIZER = demo_model_path() / "tokenizer.json"
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.fixture(scope="module")
def tokens() -> BaseTokens:
    tokenizer = json.loads(BASE_TOKENIZER.read_text())
    added = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **added}
    return BaseTokens(ids, frozenset(added), None, len(ids))


@pytest.fixture
def reader(tokens: BaseTokens) -> ConventionReader:
    return ConventionReader(tokens)


def write(folder: Path, **files: Any) -> None:
    """Write files by name ("." is "__"); contents other than text and bytes as JSON."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_folder_without_any_has_those_of_the_base(reader: ConventionReader, tmp_path: Path) -> None:
    assert reader.read(tmp_path) == NO_CONVENTIONS
    assert reader.read(tmp_path / "nowhere") == NO_CONVENTIONS


def test_a_template_is_read_as_transformers_reads_it(reader: ConventionReader, tmp_path: Path) -> None:
    write(tmp_path, chat_template__jinja=b"\xc3\xa9\r\nx\ry")
    assert reader.read(tmp_path).template == "é\nx\ny"


def test_a_template_of_a_processor(reader: ConventionReader, tmp_path: Path) -> None:
    write(tmp_path, chat_template__json={"chat_template": TEMPLATE})
    assert reader.read(tmp_path).template == TEMPLATE


def test_a_byte_order_mark_is_part_of_a_template_as_in_transformers(
    reader: ConventionReader, tmp_path: Path
) -> None:
    write(tmp_path, chat_template__jinja=b"\xef\xbb\xbf" + TEMPLATE.encode())
    template = reader.read(tmp_path).template
    shutil.copy(BASE_TOKENIZER, tmp_path)
    assert template == AutoTokenizer.from_pretrained(tmp_path).chat_template == "\ufeff" + TEMPLATE


def test_the_base_tokenizer_beside_it_is_no_other(reader: ConventionReader, tmp_path: Path) -> None:
    write(tmp_path, chat_template__jinja=TEMPLATE, tokenizer__json=BASE_TOKENIZER.read_text())
    assert reader.read(tmp_path) == AdapterConventions(TEMPLATE, digest=reader.read(tmp_path).digest)


def _tokenizer(**token: Any) -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads(BASE_TOKENIZER.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], **token})
    return tokenizer


def test_tokens_that_a_tokenizer_adds_are_told(
    reader: ConventionReader, tokens: BaseTokens, tmp_path: Path
) -> None:
    pad = _tokenizer(content="<pad>", id=len(tokens.ids))
    write(tmp_path, chat_template__jinja=TEMPLATE, tokenizer__json=pad)
    found = reader.read(tmp_path)
    assert found.template == TEMPLATE
    assert [(one.content, one.token_id) for one in found.tokens.added] == [("<pad>", len(tokens.ids))]


def test_a_unigram_vocabulary_is_by_position(tokens: BaseTokens, tmp_path: Path) -> None:
    words = [[word, -1.0] for word in sorted(tokens.ids, key=lambda one: tokens.ids[one])]
    write(tmp_path, tokenizer__json={"model": {"vocab": words}})
    assert ConventionReader(tokens).read(tmp_path) == NO_CONVENTIONS


def test_the_same_tokenizer_is_compared_once(
    reader: ConventionReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_decoded = 0
    decode = msgspec.json.decode

    def counted(*given: Any, **options: Any) -> Any:
        nonlocal num_decoded
        num_decoded += 1
        return decode(*given, **options)

    monkeypatch.setattr(msgspec.json, "decode", counted)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tokenizer__json=BASE_TOKENIZER.read_text())
        assert reader.read(tmp_path / name) == NO_CONVENTIONS
    assert num_decoded == 1


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_template__jinja": b"a\xff"}, "not valid UTF-8: invalid start byte at byte 1"),
        ({"chat_template__jinja": "x" * (1 << 20) + "x"}, "has more than 1048576 bytes"),
        ({"tokenizer_config__json": b'{"x": "\xff"}'}, "not valid UTF-8"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config__json": "[" * 100_000}, "tokenizer_config.json is not valid JSON"),
        ({"special_tokens_map__json": "{"}, "special_tokens_map.json is not valid JSON"),
        ({"added_tokens__json": "{"}, "added_tokens.json is not valid JSON"),
        ({"generation_config__json": [1]}, "generation_config.json is not a JSON object"),
        ({"generation_config__json": {"eos_token_id": "x"}}, "eos_token_id"),
        ({"tokenizer__json": {"model": {}}}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer__json": b'{"model": {"vocab": {"\xff": 1}}}'}, "tokenizer.json"),
        ({"tokenizer__json": {"model": {"vocab": {"a": 10**9}}}}, "has id 1000000000"),
    ],
)
def test_what_cannot_be_read_refuses_conversations_and_it_is_said(
    reader: ConventionReader, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: Any, reason: str
) -> None:
    write(tmp_path, **{"chat_template__jinja": TEMPLATE} | files)
    with caplog.at_level(logging.WARNING):
        found = reader.read(tmp_path)
    assert found.refusal is not None and reason in found.refusal
    assert (found.template, found.eos_token_ids) == (None, ())
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage() and reason in record.getMessage()


@pytest.mark.parametrize(
    ("limit", "name"), [("_MAX_JSON_BYTES", "added_tokens.json"), ("_MAX_TOKENIZER_BYTES", "tokenizer.json")]
)
def test_files_over_their_limits_are_not_read(
    reader: ConventionReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str
) -> None:
    monkeypatch.setattr(convention_files, limit, 100)
    (tmp_path / name).write_text(" " * 101)
    assert reader.read(tmp_path).refusal == f"{name} has more than 100 bytes"


def test_what_is_no_file_is_not_waited_for(reader: ConventionReader, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    before = open_descriptors()
    assert reader.read(tmp_path).refusal == "chat_template.jinja is not a file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    assert "chat_template.jinja" in str(reader.read(tmp_path).refusal)
    assert not open_descriptors() - before


def test_stamps_tell_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert stamps_of(tmp_path, ("a", "b")) == (None, None)
    path.write_text("1")
    before = stamps_of(tmp_path, ("a", "b"))
    assert before[0] is not None and before[1] is None
    status = path.stat()
    path.write_text("2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p does
    assert stamps_of(tmp_path, ("a", "b")) != before


def test_stamps_of_files_that_were_just_written_may_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("1")
    assert settled_stamps_of(tmp_path, ("a",)) is None
    later_ns = time.time_ns() + 2_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    assert settled_stamps_of(tmp_path, ("a",)) == stamps_of(tmp_path, ("a",))
    assert settled_stamps_of(tmp_path, ("a", "b")) is None
