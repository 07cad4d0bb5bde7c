import math
from collections import Counter, defaultdict

import pytest
from corun.cpu_workers.slices import Slice, max_tokens, split_tokens
from hypothesis import given
from hypothesis import strategies as st

requests = st.lists(st.integers(0, 300), max_size=6)
cores = st.integers(1, 9)
budgets = st.integers(1, 70)
blocks = st.sampled_from((1, 4, 8))


def _tokens_by_core(slices: tuple[Slice, ...]) -> dict[int, int]:
    totals: dict[int, int] = defaultdict(int)
    for part in slices:
        totals[part.core] += part.num_tokens
    return totals


@given(requests, cores, budgets, blocks)
def test_every_token_is_computed_exactly_once(
    tokens: list[int], num_cores: int, budget: int, block: int
) -> None:
    slices = split_tokens(tokens, num_cores=num_cores, tokens_per_core=budget, block_tokens=block)
    seen = [(part.request, part.first_token + i) for part in slices for i in range(part.num_tokens)]
    # In order, too: what comes first is also started first.
    assert seen == [(r, t) for r, count in enumerate(tokens) for t in range(count)]
    assert [part.core for part in slices] == sorted(part.core for part in slices)
    assert all(0 <= part.core < num_cores for part in slices)


@given(requests, cores, budgets, blocks)
def test_no_slice_is_longer_than_a_core_has_time_for(
    tokens: list[int], num_cores: int, budget: int, block: int
) -> None:
    slices = split_tokens(tokens, num_cores=num_cores, tokens_per_core=budget, block_tokens=block)
    longest = max(block, budget // block * block)
    assert all(0 < part.num_tokens <= longest for part in slices)
    assert all(part.first_token % block == 0 for part in slices)


@given(requests, cores, budgets)
def test_as_many_cores_as_the_tokens_need_and_equal_shares(
    tokens: list[int], num_cores: int, budget: int
) -> None:
    slices = split_tokens(tokens, num_cores=num_cores, tokens_per_core=budget, block_tokens=1)
    totals = _tokens_by_core(slices)
    needed = math.ceil(sum(tokens) / budget)
    assert len(totals) == min(needed, num_cores, sum(tokens))
    if totals:
        assert max(totals.values()) - min(totals.values()) <= 1


@given(requests, cores, budgets, blocks)
def test_shares_differ_by_a_block_and_what_ends_of_requests_lack(
    tokens: list[int], num_cores: int, budget: int, block: int
) -> None:
    slices = split_tokens(tokens, num_cores=num_cores, tokens_per_core=budget, block_tokens=block)
    shared: dict[int, int] = defaultdict(int)
    for part in slices:
        shared[part.core] += math.ceil(part.num_tokens / block)
    if shared:
        assert max(shared.values()) - min(shared.values()) <= 1


@given(requests, cores, budgets, blocks)
def test_the_number_of_slices_is_bounded(tokens: list[int], num_cores: int, budget: int, block: int) -> None:
    """Rings of jobs are sized by this: shares, and one more cut per request boundary."""
    slices = split_tokens(tokens, num_cores=num_cores, tokens_per_core=budget, block_tokens=block)
    num_blocks = sum(math.ceil(count / block) for count in tokens)
    needed = math.ceil(num_blocks / max(1, budget // block))
    shares = needed if needed <= num_cores else math.ceil(needed / num_cores) * num_cores
    assert len(slices) <= shares + max(0, sum(count > 0 for count in tokens) - 1)


@given(st.data(), cores, budgets, blocks, st.integers(1, 5), st.integers(1, 12))
def test_no_core_gets_more_slices_than_its_ring_has_slots(
    data: st.DataObject, num_cores: int, budget: int, block: int, num_requests: int, num_slots: int
) -> None:
    limit = max_tokens(
        num_cores=num_cores,
        tokens_per_core=budget,
        max_requests=num_requests,
        max_slices_per_core=num_slots,
        block_tokens=block,
    )
    left, tokens = limit, []
    for _ in range(num_requests):
        # The worst are short ones, which leave most of a block empty.
        short = data.draw(st.booleans())
        tokens.append(min(left, data.draw(st.integers(0, 2 * block if short else left))))
        left -= tokens[-1]
    slices = split_tokens(tokens, num_cores=num_cores, tokens_per_core=budget, block_tokens=block)
    assert max(Counter(part.core for part in slices).values(), default=0) <= num_slots


def test_a_budget_of_no_whole_number_of_blocks() -> None:
    """Slices are cut at blocks: 60 tokens with a budget of 15 make 8 slices, not 4."""
    limit = max_tokens(num_cores=1, tokens_per_core=15, max_requests=4, max_slices_per_core=8)
    assert limit == 43
    assert len(split_tokens([limit - 3, 1, 1, 1], num_cores=1, tokens_per_core=15)) == 8
    assert len(split_tokens([limit - 2, 1, 1, 1], num_cores=1, tokens_per_core=15)) == 9


def test_one_request_takes_the_cores_it_needs() -> None:
    assert split_tokens([40], num_cores=4, tokens_per_core=16) == (
        Slice(0, 0, 8, 0),
        Slice(0, 8, 16, 1),
        Slice(0, 24, 16, 2),
    )


def test_what_is_more_than_the_cores_have_time_for_waits() -> None:
    # Three slices on two cores would leave one idle half of the time: four shorter ones do not.
    slices = split_tokens([96], num_cores=2, tokens_per_core=32)
    assert slices == (Slice(0, 0, 24, 0), Slice(0, 24, 24, 0), Slice(0, 48, 24, 1), Slice(0, 72, 24, 1))


def test_several_requests_share_the_cores_by_tokens() -> None:
    slices = split_tokens([48, 16], num_cores=2, tokens_per_core=32)
    assert slices == (Slice(0, 0, 32, 0), Slice(0, 32, 16, 1), Slice(1, 0, 16, 1))


def test_a_step_without_cold_tokens_has_no_slices() -> None:
    assert split_tokens([], num_cores=2, tokens_per_core=32) == ()
    assert split_tokens([0, 0], num_cores=2, tokens_per_core=32) == ()


def test_no_core_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        split_tokens([1], num_cores=0, tokens_per_core=32)
