"""Costs of invocations and adapters, by number of tokens."""

from dataclasses import replace

import pytest
from support.profiles import PROFILE


def test_an_invocation_grows_with_its_tokens() -> None:
    assert PROFILE.model.invoke_s(0) == 2e-5
    assert PROFILE.model.invoke_s(100) == pytest.approx(3e-5)
    assert replace(PROFILE.model, invocation_s_per_token=0.0).invoke_s(100) == 2e-5


def test_adapters_cost_by_their_tokens_and_bytes() -> None:
    lora = PROFILE.model.lora
    assert lora.prefill_s(0, 10**6) == lora.prefill_s(10, 0) == 0.0
    assert lora.prefill_s(10, 10**6) == pytest.approx(1e-5 + 1e6 * 2e-12 + 10 * 1e-6 + 10 * 1e6 * 1e-12)
    assert lora.decode_s([10**6, 0, 2 * 10**6]) == pytest.approx(1e-5 + 3e6 * 1e-9)
    assert lora.decode_s([0, 0]) == 0.0
