"""Correct plans that the fake executor accepts, and mistakes that it finds in block tables."""

import pytest
from corun.runtime.plan import Outcome, RequestId
from support.executor_plans import FOREIGN, OTHER_PROMPTS, PROMPT, Device, request


@pytest.fixture
def device() -> Device:
    return Device()


class TestSharedBlocks:
    @pytest.mark.parametrize("has_ended", [False, True])
    def test_the_same_prefix_is_read(self, device: Device, has_ended: bool) -> None:
        device.compute()
        if has_ended:
            device.end(1)
        device.share()
        device.step((2, 10, 1))

    def test_by_two_in_one_plan_while_a_step_reads_it(self, device: Device) -> None:
        device.compute()
        device.submit((1, 10, 1))
        new, tables = [request(2), request(3)], {2: (0, 1, 3), 3: (0, 1, 4)}
        device.step((2, 8, 2), (3, 8, 2), new=new, tables=tables)
        device.executor.finish_step()

    def test_a_preempted_request_finds_its_own(self, device: Device) -> None:
        device.compute()
        device.step((1, 8, 3), tables={1: (0, 1, 5)})

    @pytest.mark.parametrize("prompt", OTHER_PROMPTS)
    def test_a_foreign_prefix_is_caught(self, device: Device, prompt: tuple[int, ...]) -> None:
        device.compute()
        device.end(1)
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share(prompt=prompt)

    @pytest.mark.parametrize("prompt", OTHER_PROMPTS)
    def test_a_block_of_others_with_other_content_is_not_handed_out(
        self, device: Device, prompt: tuple[int, ...]
    ) -> None:
        device.compute()
        with pytest.raises(AssertionError, match="a block goes to two requests"):
            device.share(prompt=prompt)

    def test_the_same_tokens_behind_another_block_are_caught(self, device: Device) -> None:
        device.compute()
        device.end(1)
        device.step((2, 0, 4), new=[request(2, OTHER_PROMPTS[0])], tables={2: (3,)})
        device.end(2)
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 4 of request 3, in block 1"):
            device.share(3, (3, 1, 4), prompt=OTHER_PROMPTS[0])

    def test_the_same_tokens_at_another_place_are_caught(self, device: Device) -> None:
        prompt = (1, 2, 3, 4) * 3
        device.compute(prompt=prompt)
        device.end(1)
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share(2, (1, 0, 3), prompt=prompt)

    @pytest.mark.parametrize("block_ids", [(0, 3, 4), (0, 2, 4)])
    def test_a_block_that_lacks_tokens_is_caught(self, device: Device, block_ids: tuple[int, ...]) -> None:
        device.compute()
        device.end(1)
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share(2, block_ids)

    def test_a_stale_block_is_caught(self, device: Device) -> None:
        device.compute()
        device.end(1)
        device.step((2, 0, 4), new=[request(2, (5,) * 9)], tables={2: (1,)})
        device.end(2)
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 4 of request 3"):
            device.share(3)

    def test_what_is_not_computed_yet_is_not_shared(self, device: Device) -> None:
        device.submit((1, 0, 10), new=[request(1)], tables={1: (0, 1, 2)})
        with pytest.raises(AssertionError, match="in use by a step"):
            device.share()


class TestNamespaces:
    def test_an_adapter_has_its_own(self) -> None:
        device = Device()
        device.load(7)
        device.compute()
        device.end(1)
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share(adapter_id=7)

    def test_versions_of_one_content_share_theirs(self) -> None:
        device = Device(namespace_of=lambda adapter_id: "content" if adapter_id else "")
        device.load(7)
        device.load(8)
        device.compute(adapter_id=7)
        device.share(2, adapter_id=8)
        device.end(1)
        device.end(2)
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share(3)

    @pytest.mark.parametrize("salt", ["", "one", "two"])
    def test_a_salt_has_its_own(self, device: Device, salt: str) -> None:
        device.executor.salts = {RequestId(1): "one", RequestId(2): salt}
        device.compute()
        device.end(1)
        if salt == "one":
            device.share()
        else:
            with pytest.raises(AssertionError, match=FOREIGN):
                device.share()

    @pytest.mark.parametrize("num_more_tokens", [1, 5])
    def test_each_rope_regime_has_its_own(self, num_more_tokens: int) -> None:
        device = Device(recompute_at_tokens=12)
        device.compute()
        device.end(1)
        prompt = PROMPT + tuple(range(num_more_tokens))
        if num_more_tokens == 1:
            device.share(2, (0, 1, 3), prompt=prompt)
        else:
            with pytest.raises(AssertionError, match=FOREIGN):
                device.share(2, (0, 1, 3, 4), prompt=prompt)

    def test_long_ones_share_theirs(self) -> None:
        device = Device(recompute_at_tokens=12)
        device.compute(prompt=(*PROMPT, 1, 2))
        device.share(prompt=(*PROMPT, 3, 4))


class TestWrites:
    def test_to_a_block_that_another_has_is_caught(self, device: Device) -> None:
        device.compute()
        device.share()
        with pytest.raises(AssertionError, match=r"1 writes to block 1, which \[2\] have"):
            device.submit((1, 4, 4))

    def test_of_a_newcomer_to_what_it_shares_is_caught(self, device: Device) -> None:
        device.compute()
        with pytest.raises(AssertionError, match=r"2 writes to block 1, which \[1\] have"):
            device.step((2, 4, 6), new=[request(2)], tables={2: (0, 1, 3)})

    def test_to_what_a_step_reads_is_caught(self, device: Device) -> None:
        """Its request has lost its table since, or has ended."""
        device.compute()
        device.submit((1, 10, 1))
        device.executor.kv.is_live = lambda request_id: request_id == 2
        with pytest.raises(AssertionError, match="written to while a step uses it: block 0"):
            device.submit((2, 0, 10), new=[request(2)], tables={2: (0, 1, 3)})

    def test_to_what_the_step_itself_reads_is_caught(self, device: Device) -> None:
        device.compute()
        device.end(1)
        device.executor.kv.is_live = lambda request_id: False
        new, tables = [request(2), request(3)], {2: (0, 1, 3), 3: (0, 1, 4)}
        with pytest.raises(AssertionError, match="written to while a step uses it: block 1"):
            device.submit((2, 8, 2), (3, 4, 6), new=new, tables=tables)

    def test_of_two_to_one_block_are_caught(self, device: Device) -> None:
        device.executor.kv.is_live = lambda request_id: False
        new, tables = [request(2), request(3)], {2: (0, 1, 3), 3: (0, 1, 4)}
        with pytest.raises(AssertionError, match="two requests write to block 0"):
            device.submit((2, 0, 4), (3, 0, 4), new=new, tables=tables)

    def test_into_what_a_preempted_request_had_are_fine(self, device: Device) -> None:
        device.compute()
        device.executor.kv.is_live = lambda request_id: request_id == 2
        device.step((2, 0, 10), new=[request(2, OTHER_PROMPTS[0])], tables={2: (4, 1, 0)})
        device.executor.kv.is_live = lambda request_id: True
        with pytest.raises(AssertionError, match=FOREIGN):
            device.step((1, 10, 1))

    def test_of_a_used_block_in_use_are_caught_before_they_happen(self, device: Device) -> None:
        device.compute()
        device.submit((1, 10, 1))
        device.executor.kv.is_live = lambda request_id: request_id == 2
        with pytest.raises(AssertionError, match="in use by a step"):
            device.submit(new=[request(2, OTHER_PROMPTS[0])], tables={2: (5, 2)})


class TestTables:
    def test_name_no_block_twice(self, device: Device) -> None:
        with pytest.raises(AssertionError, match="twice in a table"):
            device.submit(new=[request(1)], tables={1: (0, 1, 0)})

    @pytest.mark.parametrize("block_id", [-1, 16])
    def test_name_blocks_that_there_are(self, device: Device, block_id: int) -> None:
        with pytest.raises(AssertionError):
            device.submit(new=[request(1)], tables={1: (block_id,)})

    def test_are_not_replaced_under_a_step(self, device: Device) -> None:
        device.compute()
        device.submit((1, 10, 1))
        with pytest.raises(AssertionError, match="replaced while a step uses it"):
            device.submit(tables={1: (4, 5, 6)})

    def test_do_not_grow_by_what_the_request_uses(self, device: Device) -> None:
        device.compute()
        device.submit((1, 10, 1))
        with pytest.raises(AssertionError, match="in use by a step"):
            device.submit(tables={1: (1,)}, first_index=1)

    def test_begin_with_whole_blocks(self, device: Device) -> None:
        device.compute()
        device.end(1)
        with pytest.raises(AssertionError, match="begins within a block"):
            device.step((2, 6, 4), new=[request(2)], tables={2: (0, 1, 3)})

    def test_rows_skip_nothing(self, device: Device) -> None:
        device.step((1, 0, 4), new=[request(1)], tables={1: (0, 1, 2)})
        with pytest.raises(AssertionError):
            device.submit((1, 8, 2))


class TestRowsThatCameToNothing:
    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.RETRY])
    def test_leave_garbage_where_there_was_content(self, device: Device, outcome: Outcome) -> None:
        device.compute()
        device.executor.outcome_of = lambda request_id, start: outcome
        device.step((1, 4, 4))
        device.executor.outcome_of = lambda request_id, start: Outcome.TOKENS
        device.end(1)
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 4 of request 2"):
            device.share()

    def test_leave_garbage_when_they_were_spoiled(self, device: Device) -> None:
        device.executor.spoils = lambda request_id, kind: request_id == 1
        new = [request(1), request(3, OTHER_PROMPTS[0])]
        device.step((1, 0, 4), (3, 0, 10), new=new, tables={1: (3,), 3: (0, 1, 2)})
        device.end(3)
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 0 of request 2"):
            device.share(2, (0, 1, 4), prompt=OTHER_PROMPTS[0])

    def test_leave_garbage_when_they_build_on_one(self, device: Device) -> None:
        device.executor.outcome_of = lambda request_id, start: Outcome.TOKENS if start else Outcome.RETRY
        device.submit((1, 0, 4), new=[request(1)], tables={1: (0, 1, 2)})
        device.submit((1, 4, 4))
        device.executor.finish_step()
        device.executor.finish_step()
        device.executor.outcome_of = lambda request_id, start: Outcome.TOKENS
        device.step((1, 0, 4))
        device.end(1)
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 4 of request 2"):
            device.share()

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_leave_garbage_when_the_request_ended_or_the_step_was_lost(
        self, device: Device, is_lost: bool
    ) -> None:
        device.compute()
        device.submit((1, 4, 4))
        if is_lost:
            device.executor.lose_step()
        device.submit(ended_requests=(RequestId(1),))
        while device.executor.steps:
            device.executor.finish_step()
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 4 of request 2"):
            device.share()

    def test_nothing_counts_of_a_request_that_was_lost(self, device: Device) -> None:
        device.submit((1, 0, 10), new=[request(1)], tables={1: (0, 1, 2)})
        device.executor.lose_step()
        device.step((1, 0, 10))
        device.end(1)
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share()

    def test_a_retried_row_writes_over_it(self, device: Device) -> None:
        outcomes = [Outcome.TOKENS, Outcome.RETRY]
        device.executor.outcome_of = lambda request_id, start: outcomes.pop()
        device.compute()
        device.step((1, 0, 10))
        outcomes = [Outcome.TOKENS]
        device.share()

    def test_who_comes_back_need_not_begin_where_it_failed(self, device: Device) -> None:
        """Another one has computed it meanwhile."""
        device.executor.outcome_of = lambda request_id, start: (
            Outcome.RETRY if request_id == 2 and start == 0 else Outcome.TOKENS
        )
        device.step((2, 0, 4), new=[request(2)], tables={2: (4,)})
        device.compute()
        device.step((2, 8, 2), tables={2: (0, 1, 5)})
        device.share(3, (0, 1, 6))
