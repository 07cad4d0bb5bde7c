"""The engine's turn: schedule, submit, poll, update.

Owns the pairing of a scheduler with an executor, and the references that open requests hold on
adapter versions. It knows nothing of channels, processes, text or tensors.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...profiles.models import MachineModel
from ..adapter import AdapterFacts
from ..adapters.registry import AdapterVersion
from ..engine_state import Residency
from ..errors import AdapterChangedError, EngineDeadError, OverloadedError
from ..memory.loads import HostRoom
from ..memory.prefix_cache import kv_namespace
from ..memory.report import Changed, residency, take_changed
from ..plan import BASE_ADAPTER, AdapterId, Executor, HostPlaceId, RequestId, Result, StepPlan
from ..request import Request
from ..sampling import SamplingParams
from ..scheduler.events import FinishReason, RequestUpdate
from ..scheduler.scheduler import Scheduler
from ..scheduler.timeline import describe
from .messages import AddRequest, EngineLoad, EngineStats, MachineReport
from .stats import CpuStats, OpenWork, StepCounts, engine_stats, machine_report

_logger = logging.getLogger(__name__)


class AdapterVersions(Protocol):
    """Resolves adapter names and counts references: the manager, or its registry."""

    def version(self, adapter_id: AdapterId) -> AdapterVersion: ...

    def resolve(self, name: str) -> AdapterVersion: ...

    def acquire(self, adapter_id: AdapterId) -> None: ...

    def release(self, adapter_id: AdapterId) -> bool: ...

    def label(self, adapter_id: AdapterId) -> str: ...


def sampling_of(message: AddRequest, version: AdapterVersion) -> SamplingParams:
    """Return the parameters with the adapter's end tokens added to the base's.

    Raises ``AdapterChangedError`` if the prompt was made by other conventions.
    """
    conventions, sampling = version.conventions, message.sampling
    if message.conventions not in (None, conventions.digest):
        raise AdapterChangedError(
            f"adapter {version.name!r} was reloaded with another chat template, tokenizer or end "
            "token after the request's prompt was made; send the request again",
            param="lora_request",
        )
    if sampling.ignore_eos or not conventions.eos_token_ids:
        return sampling
    ends = (*sampling.stop_token_ids, *conventions.eos_token_ids)
    return dataclasses.replace(sampling, stop_token_ids=ends)


class SlowLog:
    """Logs one line for each slow request, even if it failed or was aborted before a token."""

    def __init__(self, threshold_s: float | None) -> None:
        """``threshold_s``: since the arrival in the engine; None = off."""
        self._threshold_s = threshold_s
        self._waiting: dict[int, str] = {}  # descriptions of requests without a first token

    def begin(self, request: AddRequest) -> None:
        if self._threshold_s is not None:
            name = request.name or str(request.request_id)
            model = request.adapter_name or "the base model"
            self._waiting[request.request_id] = f"request {name} for {model}"

    def record(self, event: RequestUpdate) -> None:
        if event.timing is None or self._threshold_s is None:
            return
        request = self._waiting.pop(event.request_id)
        engine_s = sum(event.timing.parts.values())
        if engine_s <= self._threshold_s:
            return
        what = "had its first token" if event.token_ids else f"ended ({event.finish_reason})"
        _logger.warning("%s %s after %.3g s: %s", request, what, engine_s, describe(event.timing))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The configuration of an engine core."""

    base_fingerprint: str  # names the base model and its revision
    dtype: str  # of the KV values
    max_steps_in_flight: int = 1
    machine: MachineModel | None = None  # measured; None = learned from steps
    log_slow_s: float | None = None  # log requests with a later first token


class EngineCore:
    """Requests in, tokens out. Not thread-safe: one thread calls it.

    Unless ``is_ready``, a caller waits on ``fileno()`` and its own inbox, until ``wake_at_s``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        adapters: AdapterVersions,
        config: CoreConfig,
        *,
        clock: Callable[[], float],
        on_adapter_gone: Callable[[AdapterId], None] | None = None,
        cpu: Callable[[], CpuStats] = CpuStats,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Connect the parts of an engine.

        Args:
            scheduler: Plans steps.
            executor: Computes steps.
            adapters: Resolves names of adapters.
            config: Other settings.
            clock: Seconds, monotonic.
            on_adapter_gone: Called when a dropped version has left the device.
            cpu: Returns statistics of CPU workers and threads.
            unix_clock: Unix time in seconds.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._adapters = adapters
        self._config = config
        self._clock = clock
        self._on_adapter_gone = on_adapter_gone
        self._cpu = cpu
        self._unix_clock = unix_clock
        self._adapter_of: dict[RequestId, AdapterId] = {}  # of open requests
        self._slow_log = SlowLog(config.log_slow_s)
        self._updates: list[RequestUpdate] = []  # for the next step to return
        self._has_changes = False  # since nothing could be scheduled
        self._asked_s = -math.inf  # of the scheduler's last call
        self._steps = StepCounts()
        self.num_advances = 0  # plans submitted, and results applied

    @property
    def has_work(self) -> bool:
        """Whether a request is open, a step or transfer is under way, or an update is pending."""
        return self._scheduler.has_work() or bool(self._updates)

    @property
    def load(self) -> EngineLoad:
        """Waiting and running requests, and KV blocks in use."""
        scheduler = self._scheduler
        num_blocks = scheduler.memory.num_used_blocks
        return EngineLoad(scheduler.num_waiting, scheduler.num_running, num_blocks)

    @property
    def is_ready(self) -> bool:
        """Whether ``step`` can make progress now, without waiting for the executor."""
        return bool(self._updates) or (self._has_changes and self._can_submit)

    @property
    def awaits_device(self) -> bool:
        """Whether a step or a copy for a request is under way on the device.

        Reading the files of an adapter is neither.
        """
        scheduler = self._scheduler
        return bool(scheduler.num_in_flight) or any(
            one.is_demand and one.is_copying for one in scheduler.memory.transfers
        )

    def wake_at_s(self) -> float | None:
        """When ``step`` can make progress without an event, on the clock; None = never.

        A deadline counts until the scheduler is called at or after it. Requests that cannot be
        scheduled then wait for an event, so that a passed deadline does not wake the caller again.
        """
        wake_at_s = self._scheduler.wake_at_s()
        if wake_at_s is None or wake_at_s <= self._asked_s or not self._can_submit:
            return None
        return wake_at_s

    def add_request(self, message: AddRequest, arrival_s: float | None = None) -> None:
        """Add a request that arrived at ``arrival_s`` and has waited for files since; None = now.

        Raises ``RequestError`` if it is refused.
        """
        adapter_id, facts = BASE_ADAPTER, None
        adapters: tuple[tuple[str, float], ...] = ()
        sampling, adapter_version = message.sampling, ""
        if message.adapter_name is not None:
            version = self._adapters.resolve(message.adapter_name)
            adapter_id, facts = version.adapter_id, version.facts
            adapters = ((facts.digest, facts.scale),)
            sampling, adapter_version = sampling_of(message, version), version.label
        now_s = self._clock()
        request = Request(
            request_id=RequestId(message.request_id),
            prompt_token_ids=message.prompt_token_ids,
            sampling=sampling,
            arrival_s=now_s if arrival_s is None else arrival_s,
            adapter_id=adapter_id,
            adapter=facts,
            adapter_version=adapter_version,
            namespace=kv_namespace(
                self._config.base_fingerprint, self._config.dtype, adapters, message.cache_salt
            ),
            num_predicted_output_tokens=message.predicted_output_tokens or 0,
        )
        self._scheduler.add_request(request, now_s)
        self._adapter_of[request.request_id] = adapter_id
        self._slow_log.begin(message)
        if message.adapter_name is not None:
            self._adapters.acquire(adapter_id)
        self._has_changes = True

    def abort(self, request_ids: Sequence[int]) -> None:
        """End these requests; their final updates come with the next step."""
        now_s = self._clock()
        for request_id in request_ids:
            event = self._scheduler.abort(RequestId(request_id), now_s)
            if event is not None:
                self._publish([event])
        self._has_changes = True

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Evict a version that no request uses and no name refers to any more.

        ``on_adapter_gone`` is called once it has left the device; until then steps in flight may
        still read it.
        """
        self._scheduler.memory.drop(adapter_id)
        self._has_changes = True

    def adapter_ready(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        """Let memory load a version while it is idle, before a request names it."""
        self._scheduler.memory.know(adapter_id, facts)
        self._has_changes = True

    def check_pin(self, num_bytes: int, other_bytes: int, replaced: AdapterId | None) -> None:
        """Raise ``RequestError`` unless ``num_bytes`` can be pinned, in place of ``replaced``."""
        self._scheduler.check_pin(num_bytes, other_bytes, replaced)

    def pin_adapter(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        """Load a version to the device as soon as there is room, and keep it there."""
        self._scheduler.memory.pins.pin(adapter_id, facts)
        self._has_changes = True

    def unpin_adapter(self, adapter_id: AdapterId) -> None:
        """Unpin a version. No error if it was not pinned."""
        self._scheduler.memory.pins.unpin(adapter_id)
        self._has_changes = True

    def evict_adapter(self, name: str) -> bool:
        """Evict the version in service for ``name``, if it is idle; return whether it was.

        Its next request finds it cold. Raises ``UnknownModelError`` or ``AdapterUnavailableError``.
        """
        is_evicted = self._scheduler.memory.evict(self._adapters.resolve(name).adapter_id)
        self._has_changes |= is_evicted
        return is_evicted

    def place_registration(self, layer_bytes: Sequence[int]) -> HostRoom:
        """Make room on the host for an adapter; ``layer_bytes``: sizes of its layers."""
        return self._scheduler.memory.registrations.begin(layer_bytes)

    def end_registration(self, place_id: HostPlaceId, digest: str | None) -> None:
        """Complete a registration; ``digest``: its content, None = it failed or is not stored."""
        self._scheduler.memory.registrations.end(place_id, digest)
        self._has_changes = True

    def drop_content(self, digest: str) -> None:
        """Remove a content that no version has any more."""
        self._scheduler.memory.drop_content(digest)
        self._has_changes = True

    def step(self, timeout_s: float = 0.0) -> list[RequestUpdate]:
        """Submit what can be scheduled, apply what has ended, and return updates.

        Without updates, it waits for the executor up to ``timeout_s``, and not beyond
        ``wake_at_s``, if something is in flight or the policy has a deadline. If it returns
        nothing, there is nothing to do before ``fileno()`` is readable, a request arrives or
        ``wake_at_s`` is reached. If it returns updates, the next step may be due: requests added
        before that call are part of it.
        """
        self._publish(self._scheduler.end_overdue(self._clock()))
        if not self._scheduler.num_in_flight:  # results must be known before a step is planned
            self._apply(self._executor.poll(0.0))
        self._fill()
        self._poll(0.0 if self._updates else timeout_s)
        if self._has_changes and not self._updates:
            self._fill()
        self._report_gone()
        updates, self._updates = self._updates, []
        return updates

    def stats(self, held: Iterable[AddRequest] = ()) -> EngineStats:
        """Return gauges and totals. O(running requests + ``held`` + adapters on the device).

        ``held``: requests that wait for their adapters to be read. Their rank is unknown, so they
        count as the base model's.
        """
        work = OpenWork(self._scheduler)
        for message in held:
            work.wait(0, len(message.prompt_token_ids))
        return engine_stats(
            self._scheduler,
            self._names_of,
            steps=self._steps,
            cpu=self._cpu(),
            work=work,
            now_s=self._clock(),
        )

    def machine(self) -> MachineReport:
        return machine_report(self._scheduler, self._config.machine)

    def take_changed_adapters(self) -> Changed:
        """Return versions and contents that may have changed level since the last call."""
        return take_changed(self._scheduler.memory)

    def residency(self, version: AdapterVersion) -> Residency:
        """Return where a version is now."""
        unix_s = self._unix_clock() - self._clock()
        return residency(self._scheduler.memory, version.adapter_id, version.facts, unix_s)

    def fileno(self) -> int:
        """A descriptor that is readable while the executor has results."""
        return self._executor.fileno()

    def _fill(self) -> None:
        """Submit steps until the limit is in flight or nothing can be scheduled."""
        while self._can_submit:
            self._asked_s = self._clock()
            plan = self._scheduler.schedule(self._asked_s)
            if plan is None:
                self._has_changes = False
                break
            if not self._submit(plan):
                break

    def _submit(self, plan: StepPlan) -> bool:
        """Submit a plan to the executor; if that raises, the plan's requests fail.

        ``EngineDeadError`` is passed on: no step can succeed any more.
        """
        self._steps.add(plan.num_tokens)
        self.num_advances += 1
        self._has_changes = True  # with more depth, the next step may follow at once
        try:
            self._executor.submit(plan)
        except EngineDeadError:
            raise
        except Exception as error:
            _logger.exception("step %d could not be submitted; its requests fail", plan.step_id)
            self._publish(self._scheduler.fail_step(plan.step_id, _reason(error), self._clock()))
            return False
        return True

    def _poll(self, timeout_s: float) -> None:
        """Apply results. If the executor raises, the oldest step's requests fail.

        Without a step in flight the exception is passed on, and so is ``EngineDeadError``.
        """
        scheduler = self._scheduler
        wake_at_s = self.wake_at_s()
        if wake_at_s is not None:
            timeout_s = min(timeout_s, max(0.0, wake_at_s - self._clock()))
        elif not self._is_waiting:
            is_stuck = scheduler.has_work() and not (self._has_changes or len(scheduler.memory.registrations))
            assert not is_stuck, "there is work, but nothing to wait for"
            return
        try:
            results = self._executor.poll(timeout_s)
        except EngineDeadError:
            raise
        except Exception as error:
            step_id = scheduler.oldest_step_in_flight
            if step_id is None:
                raise
            _logger.exception("step %d failed; its requests fail", step_id)
            self._publish(scheduler.fail_step(step_id, _reason(error), self._clock()))
            self._has_changes = True
            return
        self._apply(results)

    @property
    def _can_submit(self) -> bool:
        """Whether another step may be submitted."""
        return self._scheduler.num_in_flight < self._config.max_steps_in_flight

    @property
    def _is_waiting(self) -> bool:
        """Whether a step or a transfer is under way."""
        scheduler = self._scheduler
        return bool(scheduler.num_in_flight or len(scheduler.memory.transfers))

    def _apply(self, results: Sequence[Result]) -> None:
        now_s = self._clock()
        self.num_advances += len(results)
        for result in results:
            self._publish(self._scheduler.update(result, now_s))
            self._has_changes = True

    def _publish(self, events: list[RequestUpdate]) -> None:
        """Queue updates, and release the adapters of ended requests."""
        for event in events:
            self._updates.append(self._labelled(event))
            if (start := event.cold_start) is not None:
                _logger.info("request %d: cold start: %s: %s", event.request_id, start.strategy, start.reason)
            self._slow_log.record(event)
            if event.finish_reason is not None:
                self._release(event)

    def _labelled(self, event: RequestUpdate) -> RequestUpdate:
        """Name the adapter's version if its values have been read since the request arrived."""
        adapter_id, timing = self._adapter_of[event.request_id], event.timing
        if adapter_id == BASE_ADAPTER or timing is None or timing.adapter_version:
            return event
        return event._replace(timing=timing._replace(adapter_version=self._adapters.label(adapter_id)))

    def _release(self, event: RequestUpdate) -> None:
        """Release an ended request's reference to its adapter version."""
        adapter_id = self._adapter_of.pop(event.request_id)
        is_refused = event.error_kind == OverloadedError.__name__  # many are, under load
        if event.finish_reason is FinishReason.ERROR and not is_refused:
            _logger.error("request %d failed: %s", event.request_id, event.error)
        if adapter_id != BASE_ADAPTER and self._adapters.release(adapter_id):
            self.drop_adapter(adapter_id)

    def _report_gone(self) -> None:
        """Report dropped adapter versions that have left the device."""
        for adapter_id in self._scheduler.memory.take_removed():
            if self._on_adapter_gone is not None:
                self._on_adapter_gone(adapter_id)

    def _names_of(self, adapter_ids: Iterable[AdapterId]) -> tuple[str, ...]:
        return tuple(sorted({self._adapters.version(key).name for key in adapter_ids}))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
