"""Bodies are measured before their items are looked at."""

import json
import re
from typing import Any

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.limits import HttpLimits
from corun.runtime.server.body import check_body, check_fields, check_num_items
from hypothesis import given
from hypothesis import strategies as st


class Untouched(list[Any]):
    """Items that fail when they are looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("items were looked at")


@pytest.mark.parametrize(
    ("field", "largest", "flag"),
    [
        (
            "messages",
            [{"content": [{}] * 2, "tool_calls": [{}]}, {"content": [{}]}, {}],
            "messages has 5 content parts and tool calls, at most 4 are served (--max-content-parts)",
        ),
        (
            "logit_bias",
            dict.fromkeys(map(str, range(4)), 0),
            "logit_bias has 5 entries, at most 4 are served (--max-logit-bias)",
        ),
        ("stop", ["a"] * 4, "--max-stop-strings"),
        ("stop", "abcd", "--max-stop-bytes"),
        ("bad_words", ["ab", "cd"], "--max-bad-words-bytes"),
        ("allowed_token_ids", Untouched([1] * 4), "has 5 entries, the vocabulary has 4"),
        ("stop_token_ids", Untouched([1] * 4), "has 5 entries, the vocabulary has 4"),
        ("tokens", Untouched([1] * 4), "--max-tokenize-tokens"),
        ("model", "m" * 16_384, "16385 characters"),
        ("cache_salt", "m" * 16_384, "16385 characters"),
        ("lora_path", "m" * 16_384, "16385 characters"),
    ],
)
def test_fields_that_are_too_large(field: str, largest: Any, flag: str) -> None:
    limits = HttpLimits(
        max_content_parts=4,
        max_logit_bias=4,
        max_stop_strings=4,
        max_stop_bytes=4,
        max_bad_words_bytes=4,
        max_tokenize_tokens=4,
        vocab_size=4,
    )
    check_body({field: None}, limits)
    check_body({field: 7}, limits)  # types are checked elsewhere
    check_fields({field: largest}, limits)
    if field == "messages":
        larger: Any = [*largest, {"tool_calls": [{}]}]
    elif isinstance(largest, dict):
        larger = largest | {"more": 0}
    elif isinstance(largest, str):
        larger = largest + "€"[:1] if field == "stop" else largest + "m"
    else:
        larger = type(largest)([*list.__iter__(largest), 1 if type(largest) is Untouched else "a"])
    with pytest.raises(RequestError, match=re.escape(flag)) as caught:
        check_fields({field: larger}, limits)
    assert caught.value.param == field


def nested(depth: int, *, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [0, value] if kind is list else {"a": 0, "b": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_the_depth_of_bodies(kind: type) -> None:
    limits = HttpLimits(max_json_depth=5)
    check_body({"prompt": nested(4, kind=kind), "tokens": [1] * 1000}, limits)
    for depth in (5, 100_000):
        with pytest.raises(RequestError, match=r"more than 5 .*deep \(--max-json-depth\)"):
            check_body({"prompt": nested(depth, kind=kind)}, limits)


def test_the_length_of_conversations() -> None:
    limits = HttpLimits(max_messages=2)
    allowed: list[Any] = [[{}] * 2, "text of any length", None]
    for messages in allowed:
        check_body({"messages": messages}, limits)
    with pytest.raises(RequestError, match=r"has 3 items, at most 2 .*--max-messages") as caught:
        check_body({"messages": [{}] * 3}, limits)
    assert caught.value.param == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a",[{\\\\é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b",[\\\\'), inner),
)


def num_items(value: Any) -> int:
    """Items as the limit counts them: an array or object counts as one more than it separates."""
    if isinstance(value, dict):
        return max(1, 2 * len(value)) + sum(map(num_items, value.values()))
    if isinstance(value, list):
        return max(1, len(value)) + sum(map(num_items, value))
    return 0


@given(JSON, st.booleans())
def test_items_are_counted_without_parsing(value: Any, is_ascii: bool) -> None:
    # Long enough that the number of bytes does not decide, and that chunks end anywhere.
    filling = '\\\\"[,{' * 20_001
    body = json.dumps([filling, value, filling], ensure_ascii=is_ascii).encode()
    number = num_items([filling, value, filling])
    check_num_items(body, number)
    with pytest.raises(RequestError, match=r"more than \d+ values and names \(--max-json-items\)"):
        check_num_items(body, number - 1)


def test_a_body_of_fewer_bytes_than_items_is_not_looked_at() -> None:
    check_num_items(b"[" * 100, 100)
    with pytest.raises(RequestError):
        check_num_items(b"[" * 100, 99)


def test_what_is_no_json_is_counted_too() -> None:
    for body in (b"\\" * 200_001, b'"' * 200_001, b"\\" * 65_537 + b'"' + b"," * 50, b"\xff" * 99):
        check_num_items(body, 98)
    with pytest.raises(RequestError):
        check_num_items(b'"' + b"\\" * 65_536 + b'"' + b"," * 200, 100)
