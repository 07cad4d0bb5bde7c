"""Sampling parameters refuse what the sampler cannot do, and name the field."""

import math
from typing import Any

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.sampling import SamplingParams


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
