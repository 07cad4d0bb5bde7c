"""Loads outside of the step: which thread starts and polls copies, and failures."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from corun.gpu.adapters.arrival import Reading
from corun.gpu.adapters.loader import AdapterLoader, LoadedAdapter, ReadProgress
from corun.gpu.lora.table import DeviceAdapter
from corun.runtime.errors import AdapterError, EngineDeadError, ResourceError
from corun.runtime.plan import AdapterId, AdapterTransfer, TransferId
from support.cuda.errors import accelerator_error

TIMEOUT_S = 10.0


class Arrival:
    """An adapter with a copy that ends on the test's command."""

    def __init__(self, *, fails_to_start: bool = False, error: str | None = None) -> None:
        self.arrived = threading.Event()
        self.starter: threading.Thread | None = None
        self.ends: list[str] = []
        self.looked_late = False
        self.num_looks = 0
        self.to_read: tuple[Reading, ...] = ()
        self.num_read: Reading | None = None
        self.may_read = threading.Event()
        self.num_enqueued = 0
        self.num_asked = 0  # whether it is copying
        self.is_read_to_its_end = True
        self.is_gradual: bool | None = None
        self.runs: Sequence[range] = ()
        self._fails_to_start = fails_to_start
        self._error = error

    def start(self, *, is_gradual: bool, runs: Sequence[range] = ()) -> None:
        self.starter = threading.current_thread()
        self.is_gradual = is_gradual
        self.runs = runs
        if self._fails_to_start:
            raise RuntimeError("the device is full")

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        for reading in self.to_read:
            self.num_read = reading
            on_progress()
            while is_wanted() and not self.may_read.is_set():
                time.sleep(0.001)
            if not is_wanted():
                return

    def is_read(self) -> bool:
        return self.is_read_to_its_end

    def reading(self) -> Reading | None:
        return self.num_read

    def advance(self) -> None:
        pass

    def enqueue_all(self) -> None:
        self.num_enqueued += 1

    def is_copying(self) -> bool:
        self.num_asked += 1
        return self.num_enqueued > 0 and not self.arrived.is_set()

    def num_arrived(self) -> int:
        return int(self.arrived.is_set())

    def is_done(self) -> bool:
        self.num_looks += 1
        if self.ends:
            self.looked_late = True
        return self.arrived.is_set()

    def finish(self) -> DeviceAdapter:
        self.ends.append("finish")
        if self._error is not None:
            raise AdapterError(self._error)
        return DeviceAdapter({})

    def cancel(self) -> None:
        self.ends.append("cancel")


class Loading:
    """A loader, and the engine's thread that waits for notifications."""

    def __init__(self) -> None:
        self.fetched: list[AdapterId] = []
        self.readings: list[Reading] = []
        self.results: dict[AdapterId, Arrival | Callable[[], Arrival]] = {}
        self._told = threading.Semaphore(0)
        self.loader = AdapterLoader(self._fetch, self._told.release)

    def load(self, *adapter_ids: int, is_demand: bool = True) -> None:
        for number in adapter_ids:
            transfer = AdapterTransfer(
                TransferId(100 + number), AdapterId(number), 1, is_demand, runs=(range(number, 3),)
            )
            self.loader.start(transfer)

    def wait(self) -> list[LoadedAdapter]:
        """Wait for one notification, and do the engine's work."""
        assert self._told.acquire(timeout=TIMEOUT_S), "no notification came"
        return self.ended()

    def ended(self) -> list[LoadedAdapter]:
        events = self.loader.take_events()
        self.readings += [event.reading for event in events if isinstance(event, ReadProgress)]
        return [event for event in events if isinstance(event, LoadedAdapter)]

    def _fetch(self, transfer: AdapterTransfer) -> Arrival:
        adapter_id = transfer.adapter_id
        self.fetched.append(adapter_id)
        result = self.results[adapter_id]
        return result if isinstance(result, Arrival) else result()


@pytest.fixture
def loading() -> Iterator[Loading]:
    loading = Loading()
    yield loading
    loading.loader.close()


def refuse(error: Exception) -> Callable[[], Arrival]:
    def fetch() -> Arrival:
        raise error

    return fetch


def test_the_engines_thread_starts_copies_and_is_notified_of_their_end(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    loading.load(1)
    assert loading.wait() == []
    assert arrival.starter is threading.current_thread()
    assert arrival.runs == (range(1, 3),), "where the account says"
    assert loading.ended() == []
    arrival.arrived.set()

    (done,) = loading.wait()
    assert (done.transfer_id, done.adapter_id, done.error) == (TransferId(101), AdapterId(1), None)
    assert done.adapter is not None
    assert arrival.ends == ["finish"]


def test_copies_are_not_polled_while_the_engine_computes(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    loading.load(1)
    assert loading.wait() == []
    with loading.loader.polling_suspended():
        num_looks = arrival.num_looks
        time.sleep(0.05)  # a hundred polls, if they were not suspended
        # A poll that had begun before may end.
        assert arrival.num_looks <= num_looks + 1
        arrival.arrived.set()
    (done,) = loading.ended() or loading.wait()
    assert done.adapter_id == AdapterId(1)


def test_a_load_that_starts_while_the_engine_computes_wakes_no_thread_before_its_end(
    loading: Loading,
) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    with loading.loader.polling_suspended():
        loading.load(1)
        num_looks = arrival.num_looks
        time.sleep(0.05)
        assert arrival.num_looks == num_looks
        arrival.arrived.set()
    (done,) = loading.wait() or loading.wait()  # the start is a notification, too
    assert done.adapter_id == AdapterId(1)


def test_what_is_there_at_once_needs_no_second_look(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    arrival.arrived.set()
    loading.load(1)
    assert [done.error for done in loading.wait()] == [None]


def test_copies_end_in_any_order(loading: Loading) -> None:
    arrivals = [Arrival(), Arrival()]
    loading.results = {AdapterId(1): arrivals[0], AdapterId(2): arrivals[1]}
    loading.load(1, 2)
    assert loading.wait() == loading.wait() == []
    arrivals[1].arrived.set()
    assert [done.adapter_id for done in loading.wait()] == [2]
    arrivals[0].arrived.set()
    assert [done.adapter_id for done in loading.wait()] == [1]


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (AdapterError("its files have changed"), "its files have changed", "AdapterFailedError"),
        (ResourceError("no memory"), "no memory", "AdapterUnavailableError"),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug", "AdapterUnavailableError"),
    ],
)
def test_what_cannot_be_fetched_fails_alone(
    loading: Loading, error: Exception, reason: str, kind: str
) -> None:
    good = Arrival()
    good.arrived.set()
    loading.results = {AdapterId(1): refuse(error), AdapterId(2): good}
    loading.load(1, 2)
    ends = loading.wait() + loading.wait()
    assert [(done.adapter_id, done.error, done.error_kind) for done in ends] == [
        (1, reason, kind),
        (2, None, None),
    ]


def test_a_copy_that_cannot_be_started_is_cancelled(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival(fails_to_start=True)
    loading.load(1)
    (done,) = loading.wait()
    assert done.error == "RuntimeError: the device is full"
    assert arrival.ends == ["cancel"]


def test_a_load_that_is_cancelled_ends_when_its_files_are_no_longer_read(loading: Loading) -> None:
    """Until then its place on the host is being written."""
    arrival = loading.results[AdapterId(1)] = Arrival(fails_to_start=True)
    arrival.is_read_to_its_end = False
    loading.load(1)
    assert loading.wait() == []
    assert arrival.ends == ["cancel"]
    assert loading.ended() == []
    arrival.is_read_to_its_end = True
    assert [done.error for done in loading.ended()] == ["RuntimeError: the device is full"]
    assert loading.ended() == []


@pytest.mark.parametrize("where", ["start", "finish"])
def test_a_lost_device_ends_more_than_a_load(where: str, loading: Loading) -> None:
    lost = accelerator_error(700)
    arrival = loading.results[AdapterId(1)] = Arrival()
    arrival.arrived.set()

    def fail(**_: object) -> DeviceAdapter:
        raise AdapterError("copying it failed") from lost

    setattr(arrival, where, fail)
    loading.load(1)
    with pytest.raises(EngineDeadError, match="an illegal address"):
        loading.wait()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (accelerator_error(719), "a kernel that failed"),
        (ZeroDivisionError("a bug"), "polling copies to the device failed"),
    ],
)
def test_what_ends_the_watching_thread_is_told(error: Exception, reason: str, loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    loading.load(1)
    assert loading.wait() == []

    def fail() -> int:
        raise error

    arrival.num_arrived = fail  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=reason):
        loading.wait()


def test_a_copy_that_failed(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival(error="copying failed")
    arrival.arrived.set()
    loading.load(1)
    assert [done.error for done in loading.wait()] == ["copying failed"]
    assert arrival.ends == ["finish"]


def test_files_that_are_read_delay_no_copy(loading: Loading) -> None:
    first, gate = Arrival(), threading.Event()

    def read() -> Arrival:
        assert gate.wait(TIMEOUT_S)
        return first

    loading.results = {AdapterId(1): first, AdapterId(2): read}
    loading.load(1)
    assert loading.wait() == []
    loading.load(2)
    first.arrived.set()
    assert [done.adapter_id for done in loading.wait()] == [1]
    gate.set()
    assert [done.adapter_id for done in loading.wait()] == [2]


def test_loads_are_copied_in_order_and_at_most_two_at_a_time(loading: Loading) -> None:
    arrivals = {number: Arrival() for number in range(1, 7)}
    loading.results = {AdapterId(number): arrival for number, arrival in arrivals.items()}

    loading.loader.order([TransferId(104), TransferId(102), TransferId(101), TransferId(103)])
    loading.load(1, 2, 3, 4, 6, 5)  # the last two began in the other order
    for _ in arrivals:  # all have been fetched
        assert loading._told.acquire(timeout=TIMEOUT_S)
    assert loading.ended() == []
    assert all(arrival.num_asked <= 2 for arrival in arrivals.values()), "the work is quadratic"
    order = [4, 2, 1, 3, 5, 6]
    for num_ended, number in enumerate(order):
        copied = {one for one, arrival in arrivals.items() if arrival.num_enqueued}
        assert copied == {*order[: num_ended + 2]}
        arrivals[number].arrived.set()
        while not (ends := loading.wait()):
            pass
        assert [done.adapter_id for done in ends] == [number]


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_prefetch_whose_files_are_being_read_when_a_request_waits(
    loading: Loading, is_promoted: bool
) -> None:
    """It moves like a demand load from then on, otherwise it could starve."""
    arrival, gate = Arrival(), threading.Event()

    def read() -> Arrival:
        assert gate.wait(TIMEOUT_S)
        return arrival

    loading.results[AdapterId(1)] = read
    loading.load(1, is_demand=False)
    if is_promoted:
        loading.loader.promote(TransferId(101))
    gate.set()
    assert loading.wait() == []
    assert arrival.is_gradual is not is_promoted
    arrival.arrived.set()
    assert [done.error for done in loading.wait()] == [None]
    loading.loader.promote(TransferId(101))  # it has ended


def test_what_requests_wait_for_is_fetched_before_prefetches(loading: Loading) -> None:
    gate, begun = threading.Event(), threading.Event()

    def read() -> Arrival:
        begun.set()
        assert gate.wait(TIMEOUT_S)
        return arrival

    arrival = Arrival()
    arrival.arrived.set()
    loading.results = dict.fromkeys(map(AdapterId, range(2, 6)), arrival) | {AdapterId(1): read}
    loading.load(1, is_demand=False)
    assert begun.wait(TIMEOUT_S)
    loading.load(2, 3, is_demand=False)
    loading.load(4)
    loading.load(5, is_demand=False)
    loading.loader.promote(TransferId(103))
    gate.set()
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(loading.fetched) < 5:
        assert time.monotonic() < deadline_s
    assert loading.fetched == [1, 3, 4, 2, 5]


def test_a_prefetch_gives_way_between_two_layers(loading: Loading) -> None:
    prefetch, demanded = Arrival(), Arrival()
    prefetch.to_read = tuple(Reading(number, 0.1) for number in range(1, 9))
    read_before: list[Reading | None] = []

    def fetch() -> Arrival:
        read_before.append(prefetch.num_read)
        return demanded

    loading.results = {AdapterId(1): prefetch, AdapterId(2): fetch}
    loading.load(1, is_demand=False)
    assert loading.wait() == []
    loading.load(2)
    prefetch.may_read.set()
    deadline_s = time.monotonic() + TIMEOUT_S
    while prefetch.num_read != Reading(8, 0.1):
        assert time.monotonic() < deadline_s
    assert read_before == [Reading(2, 0.1)]


def test_files_are_read_after_their_adapter_was_handed_over(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    arrival.to_read = Reading(2, 0.5), Reading(3, 0.7)
    loading.load(1)
    assert loading.wait() == []
    assert arrival.starter is threading.current_thread()
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(loading.readings) < 2:
        assert time.monotonic() < deadline_s
        loading.ended()
        if loading.readings:
            arrival.may_read.set()
    assert loading.readings == [Reading(2, 0.5), Reading(3, 0.7)]
    assert arrival.num_enqueued >= 2


def test_closing_reads_no_further(loading: Loading) -> None:
    arrival = loading.results[AdapterId(1)] = Arrival()
    arrival.to_read = (Reading(2, 0.5), Reading(3, 0.7))
    loading.load(1)
    assert loading.wait() == []
    loading.loader.close()
    assert arrival.reading() == Reading(2, 0.5)
    assert arrival.ends == ["cancel"]


def test_closing_gives_back_what_is_under_way_and_what_was_fetched() -> None:
    loading = Loading()
    under_way, fetched = Arrival(), Arrival()
    loading.results = {AdapterId(1): under_way, AdapterId(2): fetched}
    loading.load(1)
    assert loading.wait() == []
    loading.load(2)
    deadline_s = time.monotonic() + TIMEOUT_S
    while AdapterId(2) not in loading.fetched:
        assert time.monotonic() < deadline_s
    loading.loader.close()
    loading.loader.close()
    assert under_way.ends == fetched.ends == ["cancel"]
    assert fetched.starter is None


def test_a_finished_arrival_is_not_polled(loading: Loading) -> None:
    """Its event has been released, and the device refuses its handle."""
    for number in range(1, 30):
        arrival = loading.results[AdapterId(number)] = Arrival()
        loading.load(number)
        assert loading.wait() == []
        arrival.arrived.set()
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (ends := loading.ended()):
            assert time.monotonic() < deadline_s
        assert [done.error for done in ends] == [None]
        assert not arrival.looked_late
        assert loading._told.acquire(timeout=TIMEOUT_S)
