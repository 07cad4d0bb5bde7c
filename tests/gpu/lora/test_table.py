"""The pointer table: rows, reuse, and the error of a full one."""

import gc
import weakref

import pytest
import torch
from corun.gpu.lora.base import PackedLora
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.runtime.errors import ResourceError


def make_packed(rank: int, scaling: float = 1.0) -> PackedLora:
    return PackedLora(torch.ones(rank, 6), torch.ones(4, rank), rank, scaling)


def test_entries_are_those_of_the_adapter() -> None:
    table = LoraTable(num_targets=3, capacity=2, device="cpu")
    packed = make_packed(5, scaling=0.25)
    row = table.add(DeviceAdapter({1: packed}))
    assert table.ranks[row].tolist() == [0, 5, 0]
    assert table.scalings[row].tolist() == [0.0, 0.25, 0.0]
    assert table.a_pointers[row, 1].item() == packed.a.data_ptr()
    assert table.b_pointers[row, 1].item() == packed.b.data_ptr()
    assert table.packed(row, 1) is packed
    assert table.packed(row, 0) is None


def test_addresses_never_change_and_rows_are_reused() -> None:
    table = LoraTable(num_targets=2, capacity=2, device="cpu")
    address = table.ranks.data_ptr()
    first = table.add(DeviceAdapter({0: make_packed(3)}))
    second = table.add(DeviceAdapter({1: make_packed(4)}))
    assert {first, second} == {0, 1}
    table.remove(first)
    assert table.ranks[first].tolist() == [0, 0]
    assert table.add(DeviceAdapter({1: make_packed(7)})) == first
    assert table.ranks[first].tolist() == [0, 7]
    assert table.ranks[second].tolist() == [0, 4]
    assert table.ranks.data_ptr() == address


def test_full_table_names_the_limit() -> None:
    table = LoraTable(num_targets=1, capacity=1, device="cpu")
    row = table.add(DeviceAdapter({0: make_packed(1)}))
    assert table.num_free_rows == 0
    with pytest.raises(ResourceError, match="1 adapters are on the device"):
        table.add(DeviceAdapter({0: make_packed(1)}))
    table.remove(row)
    assert table.num_free_rows == 1


def test_remove_releases_the_tensors_and_refuses_an_empty_row() -> None:
    table = LoraTable(num_targets=1, capacity=1, device="cpu")
    packed = make_packed(2)
    alive = weakref.ref(packed.a)
    row = table.add(DeviceAdapter({0: packed}))
    del packed
    gc.collect()
    assert alive() is not None
    table.remove(row)
    gc.collect()
    assert alive() is None
    with pytest.raises(AssertionError, match="empty"):
        table.remove(row)


def test_what_an_adapter_borrows_is_given_back_once() -> None:
    given_back: list[str] = []
    table = LoraTable(2, 2, "cpu")
    first = table.add(DeviceAdapter({0: make_packed(1)}, release=lambda: given_back.append("a")))
    table.add(DeviceAdapter({0: make_packed(1)}, release=lambda: given_back.append("b")))
    table.remove(first)
    assert given_back == ["a"]
    table.clear()
    table.clear()
    assert given_back == ["a", "b"]
    assert table.num_free_rows == 2


def test_adapter_knows_its_highest_rank() -> None:
    adapter = DeviceAdapter({0: make_packed(2), 3: make_packed(5)})
    assert adapter.max_rank == 5
    assert DeviceAdapter({}).max_rank == 0
