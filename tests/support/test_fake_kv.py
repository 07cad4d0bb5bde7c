"""Correct uses of KV that the fake device accepts, and mistakes with copies and freed memory."""

from typing import Any

import pytest
from corun.profiles.link import Direction
from corun.runtime.plan import BlockId, RequestId
from support.executor_plans import FOREIGN, OTHER_PROMPTS, Device, request

TO_DEVICE, TO_HOST = Direction.TO_DEVICE, Direction.TO_HOST


@pytest.fixture
def device() -> Device:
    return Device()


class TestCopies:
    @pytest.mark.parametrize(
        ("block_ids", "slots"),
        [((), ()), ((0,), (0, 1)), ((0, 0), (0, 1)), ((0, 1), (0, 0)), ((16,), (0,)), ((-1,), (0,))],
    )
    def test_that_say_too_little_or_too_much_are_caught(
        self, device: Device, block_ids: tuple[int, ...], slots: tuple[int, ...]
    ) -> None:
        with pytest.raises(AssertionError):
            device.begin(TO_HOST, block_ids, slots)

    def test_have_ids_of_their_own(self, device: Device) -> None:
        device.begin(TO_HOST, (0,), (0,))
        device.num_transfers -= 1
        with pytest.raises(AssertionError):
            device.begin(TO_HOST, (1,), (1,))

    def test_move_contents_there_and_back(self, device: Device) -> None:
        device.compute()
        device.copy(TO_HOST, (0, 1), (7, 6))
        device.end(1, freed_blocks=(0, 1, 2))
        device.copy(TO_DEVICE, (5, 4), (6, 7))
        device.share(2, (4, 5, 3))

    def test_keep_places_apart(self, device: Device) -> None:
        device.compute()
        device.copy(TO_HOST, (0, 1), (7, 6))
        device.end(1)
        device.copy(TO_DEVICE, (4, 5), (6, 7))
        with pytest.raises(AssertionError, match=FOREIGN):
            device.share(2, (4, 5, 3))

    def test_move_what_their_source_was(self, device: Device) -> None:
        """It is used again once they have ended."""
        device.compute()
        device.copy(TO_HOST, (0, 1), (0, 1))
        device.end(1)
        device.compute(3, prompt=OTHER_PROMPTS[0])
        device.copy(TO_DEVICE, (4, 5), (0, 1))
        device.share(2, (4, 5, 6))

    def test_a_read_before_the_end_is_caught(self, device: Device) -> None:
        device.compute()
        device.copy(TO_HOST, (0, 1), (0, 1))
        transfer_id = device.begin(TO_DEVICE, (4, 5), (0, 1))
        with pytest.raises(AssertionError, match="in use before its copy has ended"):
            device.submit((2, 8, 2), new=[request(2)], tables={2: (4, 5, 3)})
        assert transfer_id in device.executor.transfers

    def test_tables_may_name_what_is_to_come(self, device: Device) -> None:
        device.compute()
        device.copy(TO_HOST, (0, 1), (0, 1))
        new, tables = [request(2), request(3)], {2: (4, 5, 3), 3: (4, 5, 6)}
        transfer_id = device.begin(TO_DEVICE, (4, 5), (0, 1), new=new, tables=tables)
        device.executor.finish_transfer(transfer_id)
        device.executor.finish_step()
        device.step((2, 8, 2), (3, 8, 2))

    def test_tables_may_not_name_what_will_be_for_others(self, device: Device) -> None:
        device.compute()
        device.copy(TO_HOST, (0, 1), (0, 1))
        device.begin(TO_DEVICE, (4, 5), (0, 1))
        with pytest.raises(AssertionError, match="in use by a copy"):
            device.submit(new=[request(2, OTHER_PROMPTS[0])], tables={2: (4, 5, 3)})

    def test_into_a_block_of_a_step_in_flight_is_caught(self, device: Device) -> None:
        device.compute()
        device.copy(TO_HOST, (0,), (0,))
        device.submit((1, 10, 1))
        with pytest.raises(AssertionError, match="in use before its copy has ended"):
            device.begin(TO_DEVICE, (0,), (0,))

    @pytest.mark.parametrize("is_copied_first", [False, True])
    def test_a_write_to_the_source_is_caught(self, device: Device, is_copied_first: bool) -> None:
        device.compute()
        if is_copied_first:
            device.begin(TO_HOST, (1, 2), (0, 1))
            with pytest.raises(AssertionError, match="written to while it is copied"):
                device.submit((1, 10, 1))
        else:
            device.submit((1, 10, 1))
            with pytest.raises(AssertionError, match="written to while it is copied"):
                device.begin(TO_HOST, (1, 2), (0, 1))

    def test_a_source_is_read_meanwhile(self, device: Device) -> None:
        device.compute()
        transfer_id = device.begin(TO_HOST, (0, 1), (0, 1))
        device.executor.finish_step()
        device.share()
        device.executor.finish_transfer(transfer_id)

    def test_a_source_goes_to_nobody_else(self, device: Device) -> None:
        device.compute()
        device.begin(TO_HOST, (0, 1), (0, 1))
        device.end(1)
        with pytest.raises(AssertionError, match="in use by a copy"):
            device.submit(new=[request(2, OTHER_PROMPTS[0])], tables={2: (4, 1)})

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ((TO_HOST, (0,), (0,)), (TO_HOST, (1,), (0,))),
            ((TO_HOST, (0,), (0,)), (TO_DEVICE, (4,), (0,))),
            ((TO_DEVICE, (4,), (0,)), (TO_HOST, (0,), (0,))),
            ((TO_HOST, (0,), (0,)), (TO_DEVICE, (0,), (1,))),
            ((TO_DEVICE, (4,), (0,)), (TO_HOST, (4,), (1,))),
            ((TO_DEVICE, (4,), (0,)), (TO_DEVICE, (4,), (1,))),
        ],
    )
    def test_one_into_the_place_of_another_is_caught(
        self, device: Device, first: tuple[Any, ...], second: tuple[Any, ...]
    ) -> None:
        device.compute()
        device.end(1)
        device.begin(*first)
        with pytest.raises(AssertionError, match="two copies"):
            device.begin(*second)

    @pytest.mark.parametrize(
        ("first", "second"),
        [((TO_HOST, (0,), (0,)), (TO_HOST, (0,), (1,))), ((TO_DEVICE, (4,), (0,)), (TO_DEVICE, (5,), (0,)))],
    )
    def test_two_may_read_one_place(
        self, device: Device, first: tuple[Any, ...], second: tuple[Any, ...]
    ) -> None:
        device.compute()
        device.begin(*first)
        device.begin(*second)

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize("is_error", [False, True])
    def test_one_that_failed_leaves_garbage(
        self, device: Device, direction: Direction, is_error: bool
    ) -> None:
        """Also where the right content was before."""
        device.compute()
        device.copy(TO_HOST, (0, 1), (0, 1))
        device.copy(TO_DEVICE, (4, 5), (0, 1))
        error = "bad luck" if is_error else None
        if direction is TO_HOST:
            device.copy(TO_HOST, (0, 1), (0, 1), error)
            device.copy(TO_DEVICE, (4, 5), (0, 1))
        else:
            device.copy(TO_DEVICE, (4, 5), (0, 1), error)
        if is_error:
            with pytest.raises(AssertionError, match=FOREIGN):
                device.share(2, (4, 5, 3))
        else:
            device.share(2, (4, 5, 3))

    def test_their_blocks_count_as_bytes_in_use(self) -> None:
        device = Device(capacity_bytes=3)
        device.compute()
        device.begin(TO_HOST, (0, 1, 2), (0, 1, 2))
        with pytest.raises(AssertionError, match="more bytes in use than there are"):
            device.begin(TO_HOST, (3,), (3,))

    def test_all_end_by_themselves_where_everything_does(self) -> None:
        device = Device(is_automatic=True)
        device.submit((1, 0, 10), new=[request(1)], tables={1: (0, 1, 2)})
        device.executor.poll()
        device.begin(TO_HOST, (0,), (0,))
        assert len(device.executor.poll()) == 2
        assert not device.executor.transfers


class TestFreedBlocks:
    def test_hold_garbage(self, device: Device) -> None:
        device.compute()
        device.end(1, freed_blocks=(BlockId(1),))
        with pytest.raises(AssertionError, match=f"{FOREIGN}.* at 4 of request 2"):
            device.share()

    def test_of_a_request_are_caught(self, device: Device) -> None:
        device.compute()
        with pytest.raises(AssertionError, match="freed while a request has it"):
            device.submit(freed_blocks=(BlockId(2),))

    def test_handed_out_with_the_plan_are_caught(self, device: Device) -> None:
        with pytest.raises(AssertionError, match="freed while a request has it"):
            device.submit(new=[request(1)], tables={1: (0, 1, 2)}, freed_blocks=(BlockId(2),))

    def test_of_a_step_in_flight_are_caught(self, device: Device) -> None:
        device.compute()
        device.submit((1, 10, 1))
        with pytest.raises(AssertionError, match="freed while a step uses it"):
            device.submit(ended_requests=(RequestId(1),), freed_blocks=(BlockId(0),))

    @pytest.mark.parametrize("direction", Direction)
    def test_of_a_copy_are_caught(self, device: Device, direction: Direction) -> None:
        device.begin(direction, (0,), (0,))
        with pytest.raises(AssertionError, match="freed while it is copied"):
            device.submit(freed_blocks=(BlockId(0),))
