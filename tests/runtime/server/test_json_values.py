"""Error messages show the beginning of values, of any size."""

import time
from typing import Any

import pytest
from corun.runtime.server.json_values import show


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a", '"a"'),
        ([1, [2, {"a": None}]], '[1,[2,{"a":null}]]'),
        ({"a": 1.5, "b": True}, '{"a":1.5,"b":true}'),
        ("x" * 10**6, '"' + "x" * 58 + "…"),
        ([1] * 10**6, "[" + "1," * 29 + "…"),
        ([[1] * 10**6] * 10**6, "[[" + "1," * 28 + "1…"),
        ({"k": ["y" * 10**6] * 10**6}, '{"k":["' + "y" * 52 + "…"),
    ],
)
def test_the_beginning_is_shown(value: Any, shown: str) -> None:
    began_s = time.thread_time()
    assert show(value) == shown
    assert time.thread_time() - began_s < 1
