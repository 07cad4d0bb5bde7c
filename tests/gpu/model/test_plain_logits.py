"""Every position has a limit: a minimum, or the measured effect of rounding."""

import math

import pytest
import torch
from corun.gpu.forward.batch import StepContext
from corun.gpu.model.attention_hook import PagedAttentionHook
from corun.gpu.model.plain_logits import PlainLogits
from corun.runtime.errors import ModelError
from support.architectures import make_model

TOKENS = (5, 9, 2, 70, 33, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_right_and_what_is_wrong(dtype: torch.dtype) -> None:
    model = make_model("mixtral").to(dtype)
    hook = PagedAttentionHook(StepContext())
    truth = PlainLogits(model, hook, [TOKENS, TOKENS[:3]])
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0].float()
    for token in range(3):
        assert truth.compare(0, token, logits[token]).is_within
        assert truth.compare(1, token, logits[token]).is_within
        # The logits of another place, and none.
        assert not truth.compare(0, token, logits[token + 1]).is_within
        assert truth.compare(0, token, logits[token] * math.nan).error == math.inf
    hook.close()


def test_in_float32_the_limit_is_the_floor() -> None:
    model = make_model("mixtral")
    hook = PagedAttentionHook(StepContext())
    truth = PlainLogits(model, hook, [TOKENS])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0]
    found = truth.compare(0, 4, logits[4] + 0.01 * logits[4].abs().max())
    assert (round(found.error, 4), found.limit, found.is_within) == (0.01, 1e-3, False)
    hook.close()


def test_the_effect_of_rounding_is_measured_only_as_far_as_needed() -> None:
    model = make_model("llama").to(torch.bfloat16)
    hook = PagedAttentionHook(StepContext())
    passes: list[object] = []
    handle = model.register_forward_hook(lambda *_: passes.append(None))
    truth = PlainLogits(model, hook, [TOKENS])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0].float()
    passes.clear()
    assert truth.compare(0, 4, logits[4]).is_within
    assert len(passes) == 0
    assert not truth.compare(0, 4, -logits[4]).is_within
    assert len(passes) == 4
    handle.remove()
    hook.close()


def test_a_model_that_fails_by_itself_is_told() -> None:
    model = make_model("mixtral")
    model.lm_head = torch.nn.Identity()
    model.model.norm = torch.nn.Linear(3, 3)
    hook = PagedAttentionHook(StepContext())
    with pytest.raises(ModelError, match=r"fails .*--skip-parity-probe"):
        PlainLogits(model, hook, [TOKENS])
    hook.close()
