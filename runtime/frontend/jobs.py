"""What callers of ``Engine`` have its thread do: generate for a batch, change an adapter."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.messages import AddAdapter, AddRequest, RemoveAdapter
from ..errors import AdapterError, rebuild_error
from .engine_thread import Job
from .generation import Generation
from .local_driver import LocalDriver
from .outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt of a batch, ready for the engine."""

    generation: Generation
    requests: Sequence[AddRequest]


class GenerateJob(Job[list[RequestOutput]]):
    """Generates for a batch. One failed request ends the batch with its error."""

    def __init__(self, batch: Sequence[Submission], max_num_waiting: int) -> None:
        """A batch may be longer than the waiting queue: the rest is submitted later."""
        super().__init__()
        self._batch = batch
        self._max_num_waiting = max_num_waiting
        self._num_submitted = 0
        self._num_ended = 0  # of the first ones, without a gap

    def advance(self, driver: LocalDriver) -> None:
        """Submit what there is room for; look for ends."""
        while self._num_submitted < len(self._batch):
            one = self._batch[self._num_submitted]
            if not driver.has_room(len(one.requests), self._max_num_waiting):
                break
            driver.submit(one.generation, one.requests)
            self._num_submitted += 1
        while self._num_ended < self._num_submitted:
            generation = self._batch[self._num_ended].generation
            if generation.error is not None:
                self.future.set_exception(generation.error)
                return
            if not generation.has_ended:
                return
            self._num_ended += 1
        if self._num_ended == len(self._batch):
            self.future.set_result([one.generation.output() for one in self._batch])

    def withdraw(self, driver: LocalDriver) -> None:
        """Abort what is open."""
        driver.abort(one.generation for one in self._batch[: self._num_submitted])


class AdapterJob(Job[None]):
    """Runs one adapter operation to its end."""

    def __init__(self, message: AddAdapter | RemoveAdapter) -> None:
        super().__init__()
        self._message = message
        self._has_begun = False

    def advance(self, driver: LocalDriver) -> None:
        """Begin, then look for the end."""
        if not self._has_begun:
            self._has_begun = True
            driver.begin_operation(self._message)
            return
        done = driver.take_operation(self._message.operation_id)
        if done is None:
            return
        if done.error is None:
            self.future.set_result(None)
        else:
            error = rebuild_error(done.error_kind, done.error, default=AdapterError)
            self.future.set_exception(error)

    def withdraw(self, driver: LocalDriver) -> None:
        """Nothing: an operation that has begun ends by itself."""
