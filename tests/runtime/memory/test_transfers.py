"""The table of transfers: commands for the next plan, and the order of reading files."""

import pytest
from corun.profiles.link import Direction
from corun.runtime.memory.transfers import Change, LinkKey, OpenTransfer, TransferTable
from corun.runtime.plan import (
    AdapterId,
    BlockId,
    HostSlot,
    KvTransfer,
    TransferId,
    TransferProgress,
    TransferRead,
)
from support.invariants import check_invariants
from support.open_transfers import Loads

A, B, C = 1, 2, 3
ADAPTERS = LinkKey(Direction.TO_DEVICE, "adapter")


def copy_out(table: TransferTable) -> OpenTransfer:
    """Begin a copy of a block of 10 bytes to the host."""
    command = KvTransfer(table.new_id(), Direction.TO_HOST, (BlockId(3),), (HostSlot(1),), is_demand=False)
    copy = OpenTransfer(command=command, part_bytes=(10,))
    table.begin(copy, 2.0)
    return copy


def test_loads_and_copies_of_blocks_are_in_one_table() -> None:
    loads = Loads()
    table = loads.table
    load = loads.begin(A, (5, 5))
    copy = copy_out(table)
    assert table.num_loads_to_begin == table.num_loads == 1
    assert table.take_commands() == (load.command, copy.command)
    assert table.take_commands() == ()
    assert (table.num_loads_to_begin, table.num_loads) == (0, 1)
    assert list(table) == [load, copy] and len(table) == 2
    assert (load.direction, copy.direction) == (Direction.TO_DEVICE, Direction.TO_HOST)
    assert copy.transfer_id in table and table.load_of(AdapterId(A)) is load
    check_invariants(table)
    assert table.end(copy.transfer_id, 3.0) is copy
    assert table.end(copy.transfer_id, 3.0) is None
    assert list(table) == [load] and copy.transfer_id not in table
    loads.end(A)
    assert table.load_of(AdapterId(A)) is None
    check_invariants(table)


def test_the_order_with_a_promoted_load_at_its_end_is_sent_and_sent_again() -> None:
    loads = Loads()
    table = loads.table
    prefetch, load = loads.begin(A, (5,), is_demand=False), loads.begin(B, (5,))
    assert table.take_order() == ()
    loads.promote(A)
    assert table.take_order() == (load.transfer_id, prefetch.transfer_id)
    assert table.take_order() == ()
    loads.end(B)
    table.repeat(())
    assert table.take_order() == (prefetch.transfer_id,)


def test_an_adapter_is_loaded_once_at_a_time() -> None:
    loads = Loads()
    loads.begin(A, (5,))
    with pytest.raises(AssertionError, match="twice"):
        loads.begin(A, (5,))


def test_a_prefetch_is_promoted_once() -> None:
    loads = Loads()
    table = loads.table
    prefetch, load = loads.begin(A, (5,), is_demand=False), loads.begin(B, (5,))
    assert (prefetch.is_demand, load.is_demand) == (False, True)
    for adapter_id in (A, A, B, C):
        loads.promote(adapter_id)
    assert prefetch.is_demand and not prefetch.command.is_demand
    assert table.take_promoted() == (prefetch.transfer_id,)
    assert table.take_promoted() == ()


def test_a_direction_says_when_it_was_last_otherwise() -> None:
    loads = Loads()
    table = loads.table
    loads.begin(A, (5, 5), 1.0, is_demand=False)
    assert table.last_change(Direction.TO_DEVICE) == Change(1, 1.0)
    loads.arrived(A, 1, 1.5)
    loads.arrived(A, 1, 1.7)
    assert table.last_change(Direction.TO_DEVICE) == Change(2, 1.5), "the second was no news"
    loads.promote(A, 1.8)
    loads.promote(A, 1.9)
    assert table.last_change(Direction.TO_DEVICE) == Change(3, 1.8)
    copy_out(table)
    assert table.last_change(Direction.TO_HOST) == Change(1, 2.0)
    loads.end(A, 4.0)
    assert table.last_change(Direction.TO_DEVICE) == Change(4, 4.0)


def test_what_was_read_is_counted_once() -> None:
    loads = Loads()
    load = loads.begin(A, (5, 6, 7), is_on_host=False)
    assert (load.is_from_files, load.num_on_host) == (True, 0)
    assert loads.read(A, 2, 0.5, 0.5) == (11, 0.5)
    assert loads.read(A, 1, 0.4, 0.6) == (0, 0.0), "old news"
    assert loads.read(A, 3, 0.75, 0.8) == (7, 0.25)
    assert load.is_on_host and loads.table.reading is None


def test_of_what_has_ended_nothing_is_heard() -> None:
    loads = Loads()
    table = loads.table
    loads.begin(A, (5, 6), is_on_host=False)
    loads.end(A)
    change = table.last_change(Direction.TO_DEVICE)
    table.arrived(TransferProgress(TransferId(1), 1), 1.0)
    assert table.read(TransferRead(TransferId(1), 1, 0.5), 1.0) == (0, 0.0)
    assert table.last_change(Direction.TO_DEVICE) == change
    assert table.reading is None


def test_whose_files_are_read() -> None:
    """A prefetch is interrupted between layer groups; newer reports set the current load."""
    loads = Loads()
    table = loads.table

    def reading() -> tuple[int, float]:
        check_invariants(table)
        assert table.reading is not None
        return table.reading.load.command.adapter_id, table.reading.since_s

    loads.begin(A, (5, 5), 0.0, is_demand=False, is_on_host=False)
    loads.begin(C, (5, 5), 0.0, is_on_host=True)
    assert reading() == (A, 0.0)
    loads.begin(B, (5, 5), 1.0, is_on_host=False)
    assert reading() == (B, 1.0)
    loads.read(A, 1, 1.5, 1.5)
    assert reading() == (A, 1.5), "it was read all the same"
    loads.promote(A, 1.6)
    assert reading() == (A, 1.5)
    loads.arrived(B, 1, 1.8)
    assert reading() == (B, 1.8), "what is on the device must have been read"
    assert [load.command.adapter_id for load in table.files_in_turn()] == [B, A]
    loads.end(B, 2.0)
    assert reading() == (A, 2.0)
    loads.read(A, 2, 3.0, 3.0)
    assert table.reading is None


def test_copies_at_once_are_busy_once() -> None:
    loads = Loads()
    loads.begin(1, (5, 5), 1.0)
    loads.begin(2, (7,), 2.0)
    use = loads.table.link_use
    assert use.totals(4.0) == {ADAPTERS: (0, 3.0)}
    loads.arrived(1, 1, 4.0)
    loads.end(1, 5.0)
    assert use.totals(6.0) == {ADAPTERS: (10, 5.0)}
    loads.end(2, 6.0)
    assert use.totals(100.0) == {ADAPTERS: (17, 5.0)}


def test_who_waits_for_files_does_not_use_the_link() -> None:
    loads = Loads()
    loads.begin(1, (5, 5), 0.0, is_on_host=False)
    use = loads.table.link_use
    assert use.totals(3.0) == {ADAPTERS: (0, 0.0)}
    loads.read(1, 1, 3.0, 3.0)
    loads.arrived(1, 1, 4.0)
    assert use.totals(9.0) == {ADAPTERS: (5, 1.0)}
    loads.read(1, 2, 9.0, 9.0)
    loads.end(1, 10.0)
    assert use.totals(11.0) == {ADAPTERS: (10, 2.0)}


def test_what_has_failed_does_not_count() -> None:
    loads = Loads()
    load = loads.begin(1, (5, 5), 0.0)
    loads.arrived(1, 1, 1.0)
    loads.table.end(load.transfer_id, 2.0, has_failed=True)
    assert loads.table.link_use.totals(9.0) == {ADAPTERS: (5, 2.0)}
