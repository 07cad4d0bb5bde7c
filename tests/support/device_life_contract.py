"""The second half of the devices' contract: events that come back, failures, and ends."""

from collections.abc import Callable

import pytest
import torch
from corun.gpu.device.base import DeviceError, DeviceTimeoutError, Stream, UnrecordedEventError
from corun.shm.errors import ShmError
from support.device_contract import DeviceContract, Rig


class FailedOnPurpose(Exception):  # noqa: N818 - says what happened, as its message does
    """What a computation of the tests raises."""


class DeviceLifeContract(DeviceContract):
    """Derive, and say how the device is made and how one of its operations fails."""

    def fail(self, rig: Rig, stream: Stream) -> None:
        """Enqueue an operation that fails; its error names ``FailedOnPurpose``."""

        def compute() -> None:
            raise FailedOnPurpose("this computation fails")

        rig.device.launch(stream, compute)

    # Events.

    def test_a_wait_on_an_unrecorded_event_is_refused(self, rig: Rig) -> None:
        event = rig.device.event()
        assert not rig.device.is_done(event)
        with pytest.raises(UnrecordedEventError):
            rig.device.wait_event(rig.b, event)
        rig.finish(rig.b)
        rig.device.record(rig.a, event)
        rig.device.wait_event(rig.b, event)
        rig.finish(rig.b)
        assert rig.device.is_done(event)

    def test_an_event_is_recorded_once(self, rig: Rig) -> None:
        event = rig.recorded(rig.a)
        with pytest.raises(DeviceError, match="recorded"):
            rig.device.record(rig.a, event)

    def test_an_event_given_back_is_refused(self, rig: Rig) -> None:
        event = rig.recorded(rig.a)
        rig.finish()
        rig.device.release_event(event)
        uses: list[Callable[[], object]] = [
            lambda: rig.device.record(rig.a, event),
            lambda: rig.device.wait_event(rig.a, event),
            lambda: rig.device.is_done(event),
            lambda: rig.device.release_event(event),
        ]
        for use in uses:
            with pytest.raises(DeviceError):
                use()
        again = rig.device.event()
        assert not rig.device.is_done(again), "another generation, not recorded"
        with pytest.raises(UnrecordedEventError):
            rig.device.wait_event(rig.a, again)
        for use in uses:
            with pytest.raises(DeviceError):
                use()

    def test_events_are_used_again(self, rig: Rig) -> None:
        indices = set()
        for _ in range(50):
            event = rig.recorded(rig.a)
            rig.finish(rig.a)
            indices.add(event.index)
            rig.device.release_event(event)
        assert len(indices) < 50

    def test_waits_hold_on_an_event_given_back(self, rig: Rig) -> None:
        rig.hold(rig.a)
        event = rig.recorded(rig.a)
        rig.device.wait_event(rig.b, event)
        rig.device.release_event(event)
        # Records of the new events must not release the stream.
        for _ in range(4):
            other = rig.recorded(rig.c)
            rig.finish(rig.c)
            assert rig.device.is_done(other)
            rig.device.release_event(other)
        assert rig.is_held(rig.b)
        rig.let_go()
        rig.finish()

    # Failures.

    def test_a_failure_marks_its_stream_until_it_is_raised(self, rig: Rig) -> None:
        x, host = rig.tensor(1), rig.host(0)
        self.fail(rig, rig.a)
        self.fail(rig, rig.a)
        rig.multiply_add(rig.a, x, 1, 1)
        rig.device.copy(rig.a, host, x)
        rig.hold(rig.a)  # left out: the stream is never released
        rig.device.signal(rig.a, rig.word(1), 1)
        event = rig.recorded(rig.a)
        rig.device.wait_event(rig.b, event)
        rig.device.copy(rig.b, rig.host(1), x)
        rig.finish(rig.b)
        assert rig.device.is_done(event) and rig.shown(1) == 1
        assert host.tolist() == [0] * 8 and rig.host(1).tolist() == [1] * 8
        with pytest.raises(DeviceError, match="FailedOnPurpose"):
            rig.finish(rig.a)
        rig.finish()
        rig.device.copy(rig.a, host, x)
        rig.finish(rig.a)
        assert host.tolist() == [1] * 8

    def test_the_first_of_several_failed_streams_is_raised(self, rig: Rig) -> None:
        self.fail(rig, rig.b)
        rig.device.wait_event(rig.a, rig.recorded(rig.b))
        self.fail(rig, rig.a)
        with pytest.raises(DeviceError, match="stream b"):
            rig.finish()
        rig.finish()

    def test_a_failure_on_an_adopted_stream_is_its_threads_alone(self, rig: Rig) -> None:
        """It is raised there once, and later operations still run."""
        x, host = rig.tensor(1), rig.host(0)
        rig.device.adopt(rig.a)
        for round_number in (1, 2):
            with pytest.raises(FailedOnPurpose):
                DeviceLifeContract.fail(self, rig, rig.a)
            rig.multiply_add(rig.a, x, 1, 1)
            rig.let_go(0, round_number)
            rig.hold(rig.a, 0, round_number)
            rig.device.copy(rig.a, host, x)
            rig.device.signal(rig.a, rig.word(1), round_number)
            rig.device.wait_event(rig.b, rig.recorded(rig.a))
            rig.device.copy(rig.b, rig.host(1), x)
            rig.finish(rig.b)
            assert host.tolist() == rig.host(1).tolist() == [1 + round_number] * 8
            assert rig.shown(1) == round_number
        rig.finish()

    def test_others_failures_are_not_an_adopted_streams(self, rig: Rig) -> None:
        x = rig.tensor(1)
        rig.device.adopt(rig.a)
        self.fail(rig, rig.b)
        rig.device.wait_event(rig.a, rig.recorded(rig.b))
        rig.multiply_add(rig.a, x, 1, 1)
        rig.device.copy(rig.a, rig.host(0), x)
        rig.finish(rig.a)
        assert rig.host(0).tolist() == [2] * 8
        with pytest.raises(DeviceError, match="stream b"):
            rig.finish()

    # Waiting for the end.

    def test_synchronize_gives_up_and_leaves_everything_enqueued(self, rig: Rig) -> None:
        rig.hold(rig.a)
        rig.device.signal(rig.a, rig.word(1), 1)
        for stream in (rig.a, None):
            with pytest.raises(DeviceTimeoutError, match="stream a"):
                rig.device.synchronize(stream, timeout_s=0.02)
        rig.finish(rig.b)
        rig.let_go()
        rig.finish()
        assert rig.shown(1) == 1

    def test_waits_can_be_released(self, rig: Rig) -> None:
        assert rig.device.release_waits() == 0
        rig.let_go(3, 2**31 + 1)
        for value in (2**32 - 1, 2**32, 2**32 + 1):
            rig.let_go(0, 2**32 - 2)
            rig.hold(rig.a, 0, value)
        rig.hold(rig.b, 1, 5)
        rig.hold(rig.c, 3, 2**31)  # is reached
        rig.device.signal(rig.a, rig.word(2), 1)
        assert rig.is_held(rig.a) and rig.is_held(rig.b)
        assert rig.device.release_waits() == 2
        rig.finish()
        assert (rig.shown(0), rig.shown(1), rig.shown(2)) == (1, 5, 1)
        assert rig.device.release_waits() == 0

    def test_close_releases_an_outstanding_wait(self, rig: Rig) -> None:
        words = rig.segment.view("int32", 0, 64)
        rig.hold(rig.a)
        rig.device.signal(rig.a, rig.word(1), 9)
        rig.device.close(timeout_s=0.05)
        assert (words[0], words[16]) == (1, 9)
        del words
        rig.device.close()

    def test_close_comes_to_the_end_of_all_streams(self, rig: Rig) -> None:
        view = rig.segment.view("int32", 0, 64)
        rig.multiply_add(rig.a, rig.tensor(1, 1 << 16), 2, 1)
        rig.device.signal(rig.a, rig.word(1), 9)
        rig.device.close()
        assert view[16] == 9
        del view

    def test_nothing_works_after_close(self, rig: Rig) -> None:
        x, host, word, event = rig.tensor(), rig.host(0), rig.word(0), rig.recorded(rig.a)
        rig.device.close()
        uses: list[Callable[[], object]] = [
            lambda: rig.device.stream("d"),
            rig.device.event,
            lambda: rig.device.release_event(event),
            lambda: rig.device.is_done(event),
            lambda: rig.device.copy(rig.a, host, x),
            lambda: rig.device.signal(rig.a, word, 1),
            lambda: rig.device.wait(rig.a, word, 1),
            lambda: rig.device.record(rig.a, event),
            lambda: rig.device.wait_event(rig.a, event),
            lambda: rig.device.launch(rig.a, lambda: None),
            lambda: rig.device.synchronize(timeout_s=1),
            rig.device.release_waits,
            lambda: rig.device.register(memoryview(bytearray(4096)), name="late"),
            lambda: rig.memory.tensor(0, (1,), torch.int32),
        ]
        for use in uses:
            with pytest.raises(DeviceError, match="closed"):
                use()
        rig.device.close()

    # Streams and memory.

    def test_streams_are_made_before_the_first_operation(self, rig: Rig) -> None:
        rig.device.signal(rig.a, rig.word(0), 1)
        with pytest.raises(DeviceError, match="before the first operation"):
            rig.device.stream("d")

    def test_streams_of_another_device_are_refused(self, rig: Rig) -> None:
        with pytest.raises(DeviceError, match="another device"):
            rig.device.signal(Stream(99, "z"), rig.word(0), 1)

    def test_memory_is_given_up_in_order(self, rig: Rig) -> None:
        host = rig.host(0)
        rig.device.copy(rig.a, host, rig.tensor(4))
        rig.finish()
        with pytest.raises(ShmError):
            rig.segment.close()
        rig.memory.close()
        rig.memory.close()
        assert host.tolist() == [4] * 8, "a tensor that is still held is no dangling pointer"
        with pytest.raises(ShmError):
            rig.segment.close()
        del host
        rig.segment.close()
        with pytest.raises(DeviceError, match="closed"):
            rig.word(0)

    def test_memory_stays_while_a_stream_waits_on_it(self, rig: Rig) -> None:
        rig.hold(rig.a)
        with pytest.raises(DeviceError):
            rig.memory.close()
        rig.let_go()
        rig.finish()
        rig.memory.close()

    def test_only_what_lies_in_the_memory_can_be_taken(self, rig: Rig) -> None:
        end = rig.memory.num_bytes
        assert rig.memory.tensor(end - 8, (2,), torch.int32).shape == (2,)
        for offset, count in ((-4, 1), (end - 4, 2), (2, 1)):
            with pytest.raises(DeviceError):
                rig.memory.tensor(offset, (count,), torch.int32)
        for offset in (-4, 6, end - 2, end):
            with pytest.raises(DeviceError):
                rig.memory.word(offset, "w")

    def test_memory_that_is_registered_is_not_registered_again(self, rig: Rig) -> None:
        with pytest.raises(DeviceError):
            rig.device.register(rig.segment.buffer, name="again")
        with pytest.raises(DeviceError, match="writable"):
            rig.device.register(memoryview(bytes(4096)), name="constant")
