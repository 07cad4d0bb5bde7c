"""Assisted prefill of one cold request, written down on the symbolic device, right or wrong.

Layers below the split layer get their LoRA deltas from a worker process, in slices of tokens; the
others read the adapter's layer groups, which are loaded meanwhile. One input group per layer.
"""

from dataclasses import dataclass
from enum import Enum, auto

from corun.gpu.device.base import Event
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_program import Buffer

# Sequence numbers wrap around on the way.
_FIRST_SEQUENCE = 2**31 - 1


class Mistake(Enum):
    """One thing that is done wrong."""

    SIGNAL_BEFORE_COPY = auto()
    X_IS_NOT_AWAITED = auto()
    DONE_IS_NOT_AWAITED = auto()
    Y_IS_NOT_AWAITED = auto()
    LOAD_IS_NOT_AWAITED = auto()
    RING_TOO_SHALLOW = auto()
    PUBLISHED_BEFORE_WRITTEN = auto()
    DESCRIPTOR_HANDED_ON_EARLY = auto()
    PAGES_HANDED_ON_EARLY = auto()
    WORKER_NEVER_SIGNALS = auto()
    WORKER_SIGNALS_EARLY = auto()
    PUBLISHED_AFTER_SYNCHRONIZING = auto()
    DONE_HAS_TWO_WRITERS = auto()
    DONE_GOES_BACK = auto()
    LOADED_AFTER_COMPUTE = auto()
    EVENT_KEPT_TOO_LONG = auto()
    PAGES_KEPT = auto()
    EVENTS_KEPT = auto()
    WORD_INSTEAD_OF_EVENT = auto()
    WAIT_ISSUED_BEFORE_SIGNAL = auto()


@dataclass(frozen=True)
class Sizes:
    """Of an assisted layer's ``num_slices`` jobs as many are under way as the ring has slots."""

    num_layers: int = 3
    split_layer: int = 2
    layers_per_group: int = 1
    num_slices: int = 1
    ring_depth: int = 1
    num_descriptors: int = 2


class AssistedPrefill:
    """Writes itself down on ``device``."""

    def __init__(self, device: SymbolicDevice, sizes: Sizes, mistake: Mistake | None = None) -> None:
        self.device = device
        self.sizes = sizes
        self.mistake = mistake
        self.compute = device.stream("compute")
        self.transfer = device.stream("transfer")
        self.load = device.stream("load")
        before = _FIRST_SEQUENCE - 1
        self.published = device.word("published", initial=before)
        self.ready = device.word("ready", initial=before)
        self.done = device.word("done", initial=before)
        self.fetched = device.word("fetched")
        self.descriptors: dict[int, Buffer] = {}  # by sequence number
        self.x = [Buffer(f"x {index}") for index in range(sizes.ring_depth)]
        self.y = [Buffer(f"y {index}") for index in range(sizes.ring_depth)]
        self.arena = [Buffer(f"arena {group}") for group in range(self._num_groups)]
        self.pages: list[Buffer] = []
        self.loaded: list[Event] = []
        self.num_jobs = 0

    def write_down(self) -> None:
        """The whole life of the request."""
        self._run_worker()
        self.device.host.compute(writes=[*self.arena, Buffer("prompt")])
        self.pages = [self.device.lease(f"page {group}") for group in range(self._num_groups)]
        self.loaded = [self.device.event() for _ in self.pages]
        if self.mistake is not Mistake.LOADED_AFTER_COMPUTE:
            self._load_groups()
        for layer in range(self.sizes.num_layers):
            self._run_layer(layer)
        if self.mistake is Mistake.LOADED_AFTER_COMPUTE:
            self._load_groups()
        if self.mistake is Mistake.PAGES_HANDED_ON_EARLY:
            self._give_back()
            self.device.synchronize(timeout_s=1)
        else:
            self.device.synchronize(timeout_s=1)
            self._give_back()
        self.device.host.compute(reads=[Buffer("product")])
        self.device.close()

    @property
    def _num_groups(self) -> int:
        return -(-self.sizes.num_layers // self.sizes.layers_per_group)

    def _group(self, layer: int) -> int:
        return layer // self.sizes.layers_per_group

    def _slot(self, job: int) -> int:
        return job % self.sizes.ring_depth

    def _descriptor(self, job: int) -> str:
        return f"descriptor {job % self.sizes.num_descriptors}"

    # The worker.

    def _run_worker(self) -> None:
        worker = self.device.process("worker")
        for job in range(self.sizes.split_layer * self.sizes.num_slices):
            sequence = _FIRST_SEQUENCE + job
            group = self._group(job // self.sizes.num_slices)
            descriptor = Buffer(self._descriptor(job), job // self.sizes.num_descriptors + 1)
            reads = [descriptor, self.x[self._slot(job)], self.arena[group]]
            worker.wait(self.published, sequence)
            worker.compute(reads=[descriptor])
            worker.wait(self.ready, sequence)
            if self.mistake is Mistake.WORKER_SIGNALS_EARLY:
                worker.signal(self.done, sequence)
            worker.compute(reads=reads, writes=[self.y[self._slot(job)]])
            if self.mistake is Mistake.DONE_GOES_BACK and job > 0:
                worker.signal(self.done, sequence - 2)
            if self.mistake is not Mistake.WORKER_NEVER_SIGNALS:
                worker.signal(self.done, sequence)
        if self.mistake is Mistake.DONE_HAS_TWO_WRITERS:
            # A worker that was taken for dead.
            self.device.process("replacement").signal(self.done, _FIRST_SEQUENCE)

    # The host, and what it enqueues.

    def _load_groups(self) -> None:
        for page, arena, event in zip(self.pages, self.arena, self.loaded, strict=True):
            self.device.copy(self.load, page, arena)
            self.device.record(self.load, event)

    def _give_back(self) -> None:
        if self.mistake is not Mistake.PAGES_KEPT:
            for page in self.pages:
                self.device.give_back(page)
        if self.mistake is not Mistake.EVENTS_KEPT:
            for event in self.loaded:
                self.device.release_event(event)
        for descriptor in self.descriptors.values():
            self.device.give_back(descriptor)

    def _run_layer(self, layer: int) -> None:
        device = self.device
        x, product = Buffer("x"), Buffer("product")
        before = Buffer("prompt") if layer == 0 else product
        device.launch(self.compute, _nothing, reads=[before], writes=[x])
        if layer < self.sizes.split_layer:
            self._run_assisted(x, product)
            return
        device.launch(self.compute, _nothing, reads=[x], writes=[product])
        if self.mistake is not Mistake.LOAD_IS_NOT_AWAITED:
            device.wait_event(self.compute, self.loaded[self._group(layer)])
        page = self.pages[self._group(layer)]
        device.launch(self.compute, _nothing, reads=[x, page, product], writes=[product])

    def _run_assisted(self, x: Buffer, product: Buffer) -> None:
        device = self.device
        computed, fetched = device.event(), device.event()
        jobs = range(self.num_jobs, self.num_jobs + self.sizes.num_slices)
        self.num_jobs = jobs.stop
        if self.mistake is not Mistake.PUBLISHED_AFTER_SYNCHRONIZING:
            self._publish(jobs)
        device.record(self.compute, computed)
        if self.mistake is Mistake.WAIT_ISSUED_BEFORE_SIGNAL:
            device.wait(self.compute, self.done, _FIRST_SEQUENCE + jobs[-1])
        if self.mistake is not Mistake.X_IS_NOT_AWAITED:
            device.wait_event(self.transfer, computed)
        self._exchange(jobs, x)
        device.record(self.transfer, fetched)
        device.launch(self.compute, _nothing, reads=[x], writes=[product])
        self._await_y(fetched, jobs)
        y = [self._slice(job) for job in jobs]
        device.launch(self.compute, _nothing, reads=[product, *y], writes=[product])
        for event in (computed, fetched):
            device.release_event(event)
        if self.mistake is Mistake.EVENT_KEPT_TOO_LONG:
            device.event()
            device.wait_event(self.compute, fetched)
        if self.mistake is Mistake.PUBLISHED_AFTER_SYNCHRONIZING:
            device.synchronize(self.compute, timeout_s=1)
            self._publish(jobs)

    def _await_y(self, fetched: Event, jobs: range) -> None:
        if self.mistake is Mistake.WORD_INSTEAD_OF_EVENT:
            self.device.signal(self.transfer, self.fetched, jobs.stop)
            self.device.wait(self.compute, self.fetched, jobs.stop)
        elif self.mistake is not Mistake.Y_IS_NOT_AWAITED:
            self.device.wait_event(self.compute, fetched)

    def _publish(self, jobs: range) -> None:
        """Write descriptors, each into the slot of a job that is done."""
        host = self.device.host
        for job in jobs:
            old = job - self.sizes.num_descriptors
            if old in self.descriptors:
                if self.mistake is not Mistake.DESCRIPTOR_HANDED_ON_EARLY:
                    host.wait(self.done, _FIRST_SEQUENCE + old)
                self.device.give_back(self.descriptors.pop(old))
            self.descriptors[job] = self.device.lease(self._descriptor(job))
            if self.mistake is Mistake.PUBLISHED_BEFORE_WRITTEN:
                host.signal(self.published, _FIRST_SEQUENCE + job)
            host.compute(writes=[self.descriptors[job]])
            if self.mistake is not Mistake.PUBLISHED_BEFORE_WRITTEN:
                host.signal(self.published, _FIRST_SEQUENCE + job)

    def _exchange(self, jobs: range, x: Buffer) -> None:
        """Send x by slices and fetch y, no more slices under way than the ring has slots."""
        under_way: list[int] = []
        is_bounded = self.mistake is not Mistake.RING_TOO_SHALLOW
        for job in jobs:
            if is_bounded and len(under_way) == self.sizes.ring_depth:
                self._fetch(under_way.pop(0))
            if self.mistake is Mistake.SIGNAL_BEFORE_COPY:
                self.device.signal(self.transfer, self.ready, _FIRST_SEQUENCE + job)
            self.device.copy(self.transfer, self.x[self._slot(job)], x)
            if self.mistake is not Mistake.SIGNAL_BEFORE_COPY:
                self.device.signal(self.transfer, self.ready, _FIRST_SEQUENCE + job)
            under_way.append(job)
        for job in under_way:
            self._fetch(job)

    def _fetch(self, job: int) -> None:
        if self.mistake is not Mistake.DONE_IS_NOT_AWAITED:
            self.device.wait(self.transfer, self.done, _FIRST_SEQUENCE + job)
        self.device.copy(self.transfer, self._slice(job), self.y[self._slot(job)])

    def _slice(self, job: int) -> Buffer:
        return Buffer(f"y of slice {job % self.sizes.num_slices}")


def _nothing() -> None:
    pass


def assisted_prefill(sizes: Sizes, mistake: Mistake | None = None) -> Recording:
    """A recording of it, on a device of its own."""

    def host(device: SymbolicDevice) -> None:
        AssistedPrefill(device, sizes, mistake).write_down()

    return Recording(host)
