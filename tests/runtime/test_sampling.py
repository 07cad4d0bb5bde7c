"""Sampling parameters refuse what the sampler cannot do, and name the field."""

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
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_one_stop_string_is_a_list_of_one() -> None:
    stop: Any = "end"
    assert SamplingParams(stop=stop).stop == ("end",)
