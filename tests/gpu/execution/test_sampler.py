"""The sampler, compared with the definition of its parameters."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from corun.gpu.execution.request_table import RequestState
from corun.gpu.execution.sampler import Sampler
from corun.runtime.plan import BASE_ADAPTER, NewRequest, RequestId
from corun.runtime.sampling import SamplingParams

EOS = 2


def make_state(
    prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> RequestState:
    sampling = SamplingParams(max_tokens=64, **params)
    request = NewRequest(RequestId(1), tuple(prompt or [5, 6, 7]), sampling, BASE_ADAPTER)
    state = RequestState(request, 0, 1000)
    for token in output or []:
        state.append(token)
    return state


def draw(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    states = [make_state(seed=seed, **params) for seed in range(count)]
    rows = Sampler([EOS]).sample(logits.expand(count, -1).clone(), states)
    return [row.token_id for row in rows]


def test_greedy_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    rows = Sampler([]).sample(logits, [make_state(temperature=0), make_state(temperature=0)])
    assert [row.token_id for row in rows] == [1, 0]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.full((3, 4099), -1.0)
    logits[0, 70:] = 5.0
    logits[1, [4098, 4097]] = 5.0
    logits[2, 3], logits[2, 2000] = -0.0, 0.0
    rows = Sampler([]).sample(logits, [make_state(temperature=0)] * 3)
    assert [row.token_id for row in rows] == [70, 4097, 3]


def test_draws_follow_the_softmax() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = np.array(draw(probs.log()[None], 8000, temperature=1.0))
    counts = np.bincount(tokens, minlength=4)
    expected = probs.numpy() * 8000
    assert ((counts - expected) ** 2 / expected).sum() < 21  # chi squared, 3 degrees, 99.99 %


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    share = np.mean(np.array(draw(logits, 4000, temperature=0.5)) == 0)
    assert abs(share - 1 / (1 + math.exp(-2))) < 0.03


@pytest.mark.parametrize("temperature", [1e-9, 1e-50])  # the second one is 0 in float32
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    assert set(draw(torch.tensor([[900.0, 899.0, -900.0]]), 50, temperature=temperature)) == {0}


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.5}, {0}),  # reached exactly by the first token
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.25, "top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        ({"top_k": 1, "top_p": 0.9}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),  # of the 0.95 that top_k left, 0.475 is half
    ],
)
def test_cuts_keep_just_what_they_promise(params: dict[str, Any], allowed: set[int]) -> None:
    probs = torch.tensor([[0.45, 0.35, 0.15, 0.05]]) if params.get("top_k") == 3 else None
    if probs is None or params.get("min_p"):
        probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert set(draw(probs.log(), 2000, **params)) == allowed


def test_the_nucleus_may_be_larger_than_the_first_candidates() -> None:
    """Of equals, the first ones are the nucleus: draws come from all of it."""
    assert 4000 < max(draw(torch.zeros(1, 5000), 300, top_p=0.9)) < 4500
    assert 1300 < max(draw(torch.zeros(1, 5000), 300, top_k=1500)) < 1500


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 1500}, {"min_p": 0.5, "top_p": 0.5}])
def test_a_gpu_draws_from_a_large_nucleus_as_a_cpu_does(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, 5000)
    assert draw(logits.cuda(), 300, **params) == draw(logits, 300, **params)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    states = [make_state(seed=s, temperature=1.0, top_p=0.5 + s / 20) for s in range(6)]
    together = [r.token_id for r in Sampler([]).sample(logits.clone(), states)]
    alone = [Sampler([]).sample(logits[i : i + 1].clone(), [states[i]])[0].token_id for i in range(6)]
    assert together == alone


@pytest.mark.parametrize("params", [{"top_p": 0.2}, {"top_p": 0.9}, {"min_p": 0.001}])
def test_equally_likely_tokens_are_drawn_alike_beside_any_neighbour(params: Any) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, 50_000) * 2).bfloat16().float()  # few values: many are equal
    alone = draw(logits, 20, **params)
    wide = [make_state(seed=seed, **params) for seed in range(20)] + [make_state(top_k=3000)]
    rows = Sampler([]).sample(logits.expand(21, -1).clone(), wide)
    assert [row.token_id for row in rows[:20]] == alone


def test_top_p_refers_to_all_that_min_p_left() -> None:
    """Also where that is more than the first candidates."""
    assert 2200 < max(draw(torch.zeros(1, 5000), 300, min_p=0.5, top_p=0.5)) < 2500


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [{"stop_token_ids": tuple(range(8)), "min_tokens": 5}, {"repetition_penalty": 1e-44, "prompt": [3]}],
)
def test_a_request_that_leaves_itself_no_token_fails_alone(
    params: dict[str, Any], temperature: float
) -> None:
    states = [make_state(temperature=temperature, **params), make_state(temperature=temperature)]
    rows = Sampler([EOS]).sample(torch.arange(16.0).view(2, 8), states)
    assert rows[0].error is not None and "no token can be drawn" in rows[0].error
    assert rows[0].error_kind == "RequestError"  # not the server's fault
    assert rows[1].error is None


def test_rules_are_of_their_row_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 4)
    states = [
        make_state(temperature=0, logit_bias={2: 10.0}),
        make_state(temperature=0, allowed_token_ids=(0, 3)),
        make_state(temperature=0, output=[2], bad_words_ids=((2, 1),), logprobs=0),
        make_state(temperature=0),
    ]
    rows = Sampler([]).sample(logits, states)
    assert [row.token_id for row in rows] == [2, 3, 3, 1]
    assert rows[2].logprobs is not None and rows[2].logprobs.rank == 2  # the model's own


def test_rules_that_forbid_all_fail_their_row_alone() -> None:
    states = [
        make_state(temperature=0, allowed_token_ids=(1,), bad_words_ids=((1,),)),
        make_state(temperature=0),
    ]
    rows = Sampler([]).sample(torch.tensor([[0.0, 3.0]] * 2), states)
    assert "bad_words" in (rows[0].error or "") and rows[0].error_kind == "RequestError"
    assert rows[1].token_id == 1


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = torch.zeros(4, 8)
    logits[0, 3] = float("nan")
    logits[2, 1] = float("inf")
    logits[3, 5] = -float("inf")  # one token that cannot be is no error
    rows = Sampler([]).sample(logits, [make_state(temperature=t) for t in (0, 1, 1, 1)])
    assert rows[0].error is not None and "not finite" in rows[0].error
    assert rows[0].error_kind is None
    assert rows[1].error is None
    assert rows[2].error is not None
    assert rows[3].error is None and rows[3].token_id != 5


def test_end_tokens_are_held_back_until_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS], logits[0, 4], logits[0, 5] = 9.0, 8.0, 7.0
    sampler = Sampler([EOS])
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert sampler.sample(logits.clone(), [make_state(output=[1], **params)])[0].token_id == 5
    assert sampler.sample(logits.clone(), [make_state(output=[1, 1], **params)])[0].token_id == EOS
    ignoring = make_state(output=[1], ignore_eos=True, **params)
    assert sampler.sample(logits.clone(), [ignoring])[0].token_id == EOS


def test_penalties() -> None:
    logits = torch.tensor([[4.0, 3.9, -1.0, 0.0]])
    greedy: dict[str, Any] = {"temperature": 0, "prompt": [3]}

    def token(**params: Any) -> int:
        return Sampler([]).sample(logits.clone(), [make_state(**greedy, **params)])[0].token_id

    assert token(output=[0], presence_penalty=0.05) == 0
    assert token(output=[0], presence_penalty=0.2) == 1
    assert token(output=[0, 0, 0], frequency_penalty=0.05) == 1
    assert token(output=[0], repetition_penalty=1.1) == 1
    prompted = make_state(prompt=[0], temperature=0, repetition_penalty=1.1)
    assert Sampler([]).sample(logits.clone(), [prompted])[0].token_id == 1
    unpenalised = make_state(prompt=[0], temperature=0, presence_penalty=1.0)
    assert Sampler([]).sample(logits.clone(), [unpenalised])[0].token_id == 0


def test_penalties_count_what_is_new_and_forget_what_is_cut() -> None:
    """Step by step, with cuts, compared with a count of the whole list."""
    rng = np.random.default_rng(0)
    state = make_state(prompt=[1, 1, 2])
    for _ in range(60):
        if rng.random() < 0.3:
            state.cut(int(rng.integers(state.num_prompt_tokens, state.num_tokens + 1)))
        state.append(int(rng.integers(0, 40)))
        if rng.random() < 0.7:  # a count may lie several tokens and cuts back
            whole = state.tokens[: state.num_tokens]
            assert sorted(state.seen_tokens().tolist()) == np.unique(whole).tolist()
            tokens, counts = state.output_counts()
            expected = np.unique(whole[state.num_prompt_tokens :], return_counts=True)
            assert sorted(zip(tokens, counts, strict=True)) == list(zip(*expected, strict=True))


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    state = make_state(logprobs=2, temperature=5.0, seed=3, presence_penalty=1.0)
    row = Sampler([]).sample(logits.clone(), [state])[0]
    expected = torch.log_softmax(logits[0], dim=-1)
    assert row.logprobs is not None
    assert row.logprobs.logprob == pytest.approx(float(expected[row.token_id]))
    assert row.logprobs.top_token_ids == (1, 0)
    assert row.logprobs.top_logprobs == pytest.approx(expected[[1, 0]].tolist())
    assert row.logprobs.rank == int((expected > expected[row.token_id]).sum()) + 1


@pytest.mark.parametrize(
    "params", [{"min_tokens": 3}, {"repetition_penalty": 2.0}, {"presence_penalty": 1.0}]
)
def test_adjusts_what_a_model_computed(params: dict[str, Any]) -> None:
    """A runner's logits are made in inference mode, and may be changed only there."""
    with torch.inference_mode():
        logits = torch.full((1, 8), 0.9)
        logits[0, EOS] = 1.0
    (row,) = Sampler([EOS]).sample(logits, [make_state([EOS, 5], [EOS], temperature=0, **params)])
    assert row.error is None
    assert row.token_id != EOS


def mixed_states(num_columns: int) -> list[RequestState]:
    """Rows with every parameter, alone and together."""
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.3},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 20},
        {"temperature": 9.0, "top_p": 0.999},
        {"temperature": 5.0, "top_k": 1500},
        {"top_k": 3, "logprobs": 0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5, "temperature": 0, "logprobs": 1},
        {"presence_penalty": 0.5, "frequency_penalty": -0.25, "temperature": 2.0},
        {"repetition_penalty": 0.5, "frequency_penalty": 1.0, "min_p": 0.01, "top_k": 9},
        {"min_tokens": 9, "stop_token_ids": (4,), "logit_bias": {5: 3.0}},
        {"allowed_token_ids": (1, 8, num_columns - 1), "temperature": 3.0, "logprobs": 2},
    ]
    return [
        make_state(prompt=[1, row, 1], output=[row, *[2] * (row % 4)], seed=row, **one)
        for row, one in enumerate(params)
    ]


@pytest.mark.parametrize("num_columns", [40, 5000])
def test_rows_with_all_parameters_get_what_they_get_alone(num_columns: int) -> None:
    states = mixed_states(num_columns)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((len(states), num_columns)).astype(np.float32)
    logits = torch.from_numpy(values).bfloat16().float()  # many are equal
    random = [row for row, state in enumerate(states) if state.sampling.temperature > 0]
    for order in (range(len(states)), rng.permutation(len(states)), random):
        together = Sampler([EOS]).sample(logits[list(order)], [states[row] for row in order])
        for row, result in zip(order, together, strict=True):
            alone = Sampler([EOS]).sample(logits[row : row + 1].clone(), [states[row]])
            assert alone == [result]
            assert result.error is None


def test_equally_likely_alternatives_are_reported_by_id() -> None:
    (row,) = Sampler([]).sample(torch.zeros(1, 500), [make_state(temperature=0, logprobs=3)])
    assert row.token_id == 0 and row.logprobs is not None
    assert row.logprobs.rank == 1 and len(set(row.logprobs.top_logprobs)) == 1
    logits = torch.zeros(1, 500)
    logits[0, [7, 400, 3, 91]] = 1.0
    (row,) = Sampler([]).sample(logits, [make_state(temperature=0, logprobs=4)])
    assert row.logprobs is not None and row.logprobs.top_token_ids == (3, 7, 91, 400)


def test_a_row_that_fails_does_not_disturb_one_whose_nucleus_is_large() -> None:
    """The flat row is drawn again from the whole vocabulary; its report is of the last draw."""
    logits = torch.zeros(3, 5000)
    logits[0] = float("nan")
    states = [make_state(seed=3, top_p=0.9, logprobs=0) for _ in range(2)]
    rows = Sampler([]).sample(logits, [*states, make_state(temperature=0)])
    (alone,) = Sampler([]).sample(torch.zeros(1, 5000), [states[1]])
    assert rows[0].error is not None and rows[1] == alone and rows[2].token_id == 0
    peaked = torch.arange(5000.0)[None] * 1e-4
    for seed in range(20):
        one = make_state(seed=seed, top_p=0.9, logprobs=0)
        (row,) = Sampler([]).sample(peaked.clone(), [one])
        assert row.logprobs is not None and row.logprobs.rank == 5000 - row.token_id
