"""Sampling parameters refuse what the sampler cannot do, and name the field."""

import math
from typing import Any

import msgspec
import pytest
from corun.runtime.errors import RequestError
from corun.runtime.sampling import SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("seed", 2**64),
        ("stop_token_ids", (3, -1)),  # an index from the end of the vocabulary
        ("stop", ("",)),
        ("max_tokens", -1),
        ("max_tokens", 0),  # nothing would be shown
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_a_request_without_tokens_scores_its_prompt() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(RequestError, match="0 is for requests that score their prompt"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, min_tokens=1)


def test_one_stop_string_is_a_list_of_one() -> None:
    stop: Any = "end"
    assert SamplingParams(stop=stop).stop == ("end",)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ("x",) * 129}, "bad_words"),
        ({"bad_words_ids": ((),)}, "bad_words"),
    ],
)
def test_rules_of_tokens_that_cannot_be(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("xml", "{}", "the kind of guided_json is 'xml', must be one of json_schema, json_object"),
        ("regex", "x" * 65537, "guided_json has 65537 bytes or more, at most 65536 are served"),
        ("regex", "é" * 32769, "guided_json has 65538 bytes or more"),
        ("regex", "a\ud800", "guided_json is not valid Unicode: surrogates not allowed at char"),
    ],
)
def test_structures_that_cannot_be(kind: str, text: str, error: str) -> None:
    with pytest.raises(RequestError, match=error) as caught:
        StructuredOutput(kind, text, "guided_json")
    assert caught.value.param == "guided_json"


def test_a_structure_reaches_the_engine() -> None:
    params = SamplingParams(structured_output=StructuredOutput("regex", "[0-9]+"))
    sent = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == params
