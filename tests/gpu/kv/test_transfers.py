"""Copies of KV blocks concurrent with steps: contents, order, and failures."""

import logging
import mmap
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.cuda import open_cuda_device
from corun.gpu.device.host_memory import TorchDevice
from corun.gpu.device.link import PacedLink
from corun.gpu.kv import host as host_kv
from corun.gpu.kv import transfers
from corun.gpu.model.kv_pool import KvLayout, LayerKvShape
from corun.profiles.link import Direction
from corun.runtime.errors import EngineDeadError
from corun.runtime.memory.host_budget import HostSections
from corun.runtime.plan import TransferId, TransferResult
from support.cuda.errors import accelerator_error
from support.devices import DEVICES
from support.host_kv import LAYOUT, HostTier, NotingDevice, open_tier
from support.loading_engine import HeldLink

TO_DEVICE, TO_HOST = Direction.TO_DEVICE, Direction.TO_HOST
BLOCK_BYTES = LAYOUT.block_bytes
LAYOUTS = {
    "one head": KvLayout((LayerKvShape(1, 64, 64),), 16, torch.bfloat16),
    "other values": KvLayout((LayerKvShape(2, 8, 4), LayerKvShape(3, 6, 10)), 4, torch.float16),
    "odd": KvLayout((LayerKvShape(3, 5, 7),) * 3, 1, torch.float32),
    "in two pieces": KvLayout((LayerKvShape(8, 128, 128),) * 3, 512, torch.float16),
}


class Noting:
    """A tier with copies that begin on the test's command."""

    def __init__(self) -> None:
        self.link = HeldLink()
        self.device = NotingDevice(self.link)
        self.tier = HostTier(self.device)

    @property
    def copies(self) -> list[str]:
        """The streams on which copies were enqueued since the last call."""
        copies, self.device.copies = self.device.copies, []
        return copies


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noting]:
    monkeypatch.setattr(transfers, "_BATCH_BYTES", BLOCK_BYTES)
    noting = Noting()
    yield noting
    noting.link.is_open = True
    noting.tier.close()


def ended(*numbers: int) -> list[TransferResult]:
    return [TransferResult(TransferId(number)) for number in numbers]


def apart(num_blocks: int, first: int = 0) -> dict[int, int]:
    """No two blocks in adjacent slots."""
    return {first + number: 2 * number for number in range(num_blocks)}


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_contents_come_back_to_other_blocks(name: str, where: str) -> None:
    device: TorchDevice = CpuDevice() if where == "cpu" else open_cuda_device()
    compute = device.stream("compute")
    tier = HostTier(device, LAYOUTS[name], num_blocks=6, where=where)
    if where == "cuda":
        device.adopt(compute)
        tier.host.set_compute_stream(compute)
    kept = tier.fill(1)
    tier.move(TO_HOST, {0: 3, 1: 4, 5: 0})
    other = tier.fill(2)
    tier.move(TO_DEVICE, {2: 3, 3: 0, 4: 4})
    for block, contents in enumerate((other[0], other[1], kept[0], kept[5], kept[1], other[5])):
        assert torch.equal(tier.block(block), contents), block
    tier.close()


def test_blocks_side_by_side_in_slots_that_are_go_in_one_copy() -> None:
    device = NotingDevice()
    with open_tier(device, HostSections(3, mmap.PAGESIZE, 4, 0)) as tier:
        kept = tier.fill(1)
        tier.move(TO_HOST, {1: 0, 2: 1, 3: 2, 6: 3, 5: 5, 8: 8, 9: 9})
        assert len(device.copies) == 4
        tier.move(TO_HOST, {10: 2, 11: 3, 12: 4})  # the third lies in another section
        assert len(device.copies) == 4 + 2
        tier.fill(2)
        tier.move(TO_DEVICE, {0: 0, 7: 1, 13: 5, 14: 8, 15: 9, 1: 2, 2: 3, 3: 4})
        for block, was in {0: 1, 7: 2, 13: 5, 14: 8, 15: 9, 1: 10, 2: 11, 3: 12}.items():
            assert torch.equal(tier.block(block), kept[was]), block


def test_a_large_copy_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_PIECE_BYTES", 2 * BLOCK_BYTES)
    device = NotingDevice()
    with open_tier(device) as tier:
        tier.move(TO_HOST, {block: block for block in range(5)})
        assert len(device.copies) == 3
    monkeypatch.setattr(transfers, "_PIECE_BYTES", BLOCK_BYTES // 2)
    device = NotingDevice()
    with open_tier(device) as tier:
        tier.move(TO_HOST, {0: 0, 1: 1})
        assert len(device.copies) == 4


def test_copies_take_the_link_in_their_direction() -> None:
    num_bytes = 8 * BLOCK_BYTES
    rate = num_bytes / 0.05  # bytes per second
    with open_tier(CpuDevice(link=PacedLink(rate / 2**30))) as tier:
        for direction, counts in ((TO_HOST, (1, 0)), (TO_DEVICE, (1, 1))):
            begin_s = time.monotonic()
            tier.move(direction, {block: block for block in range(8)})
            assert time.monotonic() - begin_s >= 0.05
            stats = [tier.device.link.stats(way).num_bytes for way in (TO_HOST, TO_DEVICE)]
            assert stats == [count * num_bytes for count in counts]


def test_demands_go_before_prefetches_before_copies_to_the_host(noting: Noting) -> None:
    noting.link.is_open = False
    noting.tier.start(1, TO_HOST, apart(2))
    noting.tier.start(2, TO_DEVICE, apart(2, first=4), is_demand=False)
    noting.tier.start(3, TO_DEVICE, apart(3, first=8))
    assert noting.tier.take() == []
    assert noting.copies == 3 * ["KV demand"] + 2 * ["KV to host"]
    noting.link.is_open = True
    assert sorted(noting.tier.wait(3), key=str) == ended(1, 2, 3)
    assert noting.copies == 2 * ["KV prefetch"]


def test_a_demand_passes_what_has_not_begun_of_a_prefetch(noting: Noting) -> None:
    noting.link.is_open = False
    noting.tier.start(1, TO_DEVICE, apart(6), is_demand=False)
    noting.tier.take()
    assert noting.copies == 2 * ["KV prefetch"], "no more than a few batches at a time"
    noting.tier.start(2, TO_DEVICE, apart(3, first=8))
    noting.tier.take()
    assert noting.copies == 3 * ["KV demand"]
    noting.link.is_open = True
    assert noting.tier.wait(2) == ended(2, 1)
    assert noting.copies == 4 * ["KV prefetch"]


def test_a_prefetch_waits_while_requests_wait_for_something_else(noting: Noting) -> None:
    noting.tier.start(1, TO_DEVICE, apart(2), is_demand=False)
    noting.tier.take(is_link_wanted=True)
    assert noting.copies == []
    noting.tier.start(2, TO_DEVICE, apart(2, first=4))
    noting.tier.take(is_link_wanted=True)
    assert noting.copies == 2 * ["KV demand"]
    assert noting.tier.wait(2) == ended(2, 1)


def test_a_prefetch_that_a_request_waits_for_goes_on_as_a_demand(noting: Noting) -> None:
    kept = noting.tier.fill(1)
    noting.tier.move(TO_HOST, apart(6))
    noting.tier.fill(2)
    noting.link.is_open = False
    noting.tier.start(1, TO_DEVICE, apart(6), is_demand=False)
    noting.tier.take()
    _ = noting.copies
    noting.tier.transfers.promote(TransferId(1))
    noting.tier.transfers.promote(TransferId(7))  # has ended, for all that is known here
    noting.tier.take()
    assert noting.copies == 4 * ["KV demand"]
    noting.tier.transfers.promote(TransferId(1))  # once more changes nothing
    noting.link.is_open = True
    assert noting.tier.wait() == ended(1)
    assert all(torch.equal(noting.tier.block(block), kept[block]) for block in range(6))


def test_a_copy_that_fails_is_told_and_others_go_on(noting: Noting) -> None:
    noting.link.num_to_fail = 1
    noting.tier.start(1, TO_HOST, apart(3))
    (result,) = noting.tier.wait()
    assert result.transfer_id == TransferId(1)
    assert result.error is not None and "the link failed" in result.error
    kept = noting.tier.fill(1)
    noting.tier.move(TO_HOST, apart(3))
    noting.tier.fill(2)
    noting.tier.move(TO_DEVICE, apart(3))
    assert all(torch.equal(noting.tier.block(block), kept[block]) for block in range(3))
    assert noting.tier.transfers.is_idle


def test_what_is_enqueued_behind_a_failure_fails_with_it(noting: Noting) -> None:
    noting.link.is_open = False
    noting.link.num_to_fail = 1
    noting.tier.start(1, TO_DEVICE, apart(2))
    noting.tier.start(2, TO_DEVICE, apart(2, first=4))
    noting.tier.take()
    noting.link.let(1)
    errors = {result.transfer_id: result.error for result in noting.tier.wait(2)}
    assert set(errors) == {1, 2} and all(errors.values())
    noting.link.is_open = True
    noting.tier.move(TO_DEVICE, apart(2))


def test_a_copy_that_cannot_be_enqueued_is_told(noting: Noting) -> None:
    noting.device.refusal = DeviceError("no such memory")
    noting.tier.start(1, TO_DEVICE, apart(3))
    (result,) = noting.tier.wait()
    assert result.error == "copying KV blocks failed: DeviceError: no such memory"
    noting.tier.move(TO_DEVICE, apart(3))


def test_a_transfer_has_not_ended_while_some_of_it_moves(noting: Noting) -> None:
    noting.link.is_open = False
    noting.tier.start(1, TO_DEVICE, apart(6), is_demand=False)
    noting.tier.take()
    noting.device.refusal = DeviceError("no such memory")
    noting.tier.transfers.promote(TransferId(1))
    noting.tier.take()
    assert noting.tier.take() == [], "two blocks of it are being written"
    noting.link.is_open = True
    (result,) = noting.tier.wait()
    assert result.error is not None and "no such memory" in result.error


def test_a_lost_device_ends_the_engine(noting: Noting) -> None:
    noting.link.is_open = False
    noting.tier.start(1, TO_DEVICE, apart(2))
    noting.tier.take()
    noting.device.loss = accelerator_error(700)
    with pytest.raises(EngineDeadError, match="lost"):
        noting.tier.wait()
    noting.device.loss = None


def test_copies_are_not_polled_while_the_engine_computes(noting: Noting) -> None:
    noting.link.is_open = False
    with noting.tier.transfers.polling_suspended():
        noting.tier.start(1, TO_DEVICE, apart(2))
        noting.tier.take()
        noting.device.loss = accelerator_error(700)
        time.sleep(0.05)  # a hundred polls, if they were not suspended
        noting.device.loss = None
    noting.link.is_open = True
    assert noting.tier.wait() == ended(1)


def test_closing_drops_what_has_not_begun_and_waits_for_the_rest(noting: Noting) -> None:
    noting.link.is_open = False
    noting.tier.start(1, TO_DEVICE, apart(6), is_demand=False)
    noting.tier.take()
    assert noting.copies == 2 * ["KV prefetch"]
    closing = threading.Thread(target=noting.tier.transfers.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "copies are under way"
    noting.link.is_open = True
    closing.join(10.0)
    assert not closing.is_alive()
    assert noting.copies == []
    assert noting.device.num_events == 0
    noting.tier.transfers.close()


def test_closing_does_not_wait_for_ever(
    noting: Noting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_kv, "_END_TIMEOUT_S", 0.05)
    noting.link.is_open = False
    noting.tier.start(1, TO_DEVICE, apart(2))
    noting.tier.take()
    with caplog.at_level(logging.ERROR):
        noting.tier.transfers.close()
    assert "stays registered" in caplog.text
