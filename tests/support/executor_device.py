"""An executor over a tiny model in the calling thread, and short forms of a plan's parts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from corun.gpu.adapters.arrival import AdapterLoad, Copied
from corun.gpu.check.engine import ReadyLoad
from corun.gpu.execution import assemble
from corun.gpu.execution.executor import AdapterFetch, DeviceExecutor
from corun.gpu.execution.row_grammar import MakeMatcher
from corun.gpu.execution.sampler import Sampler
from corun.gpu.kv.host import HostKv
from corun.gpu.lora.table import DeviceAdapter
from corun.gpu.model.source import ModelSource
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import AdapterError
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    BlockId,
    BlockUpdate,
    NewRequest,
    RequestId,
    StepId,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
    TransferId,
    TransferProgress,
    TransferResult,
)
from corun.runtime.sampling import SamplingParams
from corun.shm.errors import ShmError
from support.host_kv import all_kv

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ADAPTER = AdapterId(5)


class Arriving(Copied):
    """An adapter with its first layers on the device; the others never arrive."""

    def __init__(self, adapter: DeviceAdapter) -> None:
        self._given = adapter

    @property
    def adapter(self) -> DeviceAdapter:
        return self._given

    def start(self, *, is_gradual: bool, runs: Sequence[range] = ()) -> None:
        """Nothing is copied."""

    def is_copying(self) -> bool:
        return False

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Nothing is read."""

    def reading(self) -> None:
        """Nothing is read."""

    def enqueue_all(self) -> None:
        """Nothing moves."""

    def advance(self) -> None:
        """Nothing moves."""

    def num_arrived(self) -> int:
        return 1

    def is_done(self) -> bool:
        return False

    def is_read(self) -> bool:
        return True

    def has_failed(self) -> bool:
        return False

    def cancel(self) -> None:
        """Nothing is borrowed."""


def load_tiny(config: EngineConfig) -> assemble.LoadedModel:
    """Load a model as a start does, with the choices that all tests keep."""
    assert config.model is not None
    kept = Path(os.environ["XDG_STATE_HOME"], "corun")
    return assemble.load(ModelSource(config.model), config, lambda _: None, kept=kept)


class ExecutorDevice:
    """An executor over a tiny model, and what its loads bring."""

    def __init__(self, directory: Path, make_matcher: MakeMatcher | None = None) -> None:
        config = EngineConfig(
            model=str(directory),
            device="cpu",
            dtype="float32",
            block_size=4,
            linear_backend="plain",
            attention_backend="torch",
            lora_backend="torch",
        )
        self.loaded = load_tiny(config)
        self.runner = assemble.make_runner(self.loaded, 32)
        block_bytes = self.runner.pool.block_bytes
        kv = all_kv(8, block_bytes)  # and another section, which adapters have
        self.refusal: ShmError | None = None  # of the next section that adapters are to give
        self.adapter: DeviceAdapter | Arriving | Exception = AdapterError("its files have changed")
        self.host_log: list[str] = []
        self.workers: Any = mock.Mock(begin=self._begin, num_ready_workers=0)
        self.executor: DeviceExecutor = assemble.make_executor(
            self.loaded,
            self.runner,
            AdapterFetch(self._fetch, lambda ids: self.host_log.append(f"evict {ids}"), memory=self),
            Sampler((2,), make_matcher),
            max_model_len=64,
            assistant=self.workers,
            host_kv=HostKv(
                self.loaded.device, replace(kv, num_sections=2, num_adapter_sections=1), block_bytes
            ),
        )
        self.assistant: Any = None  # of ASSISTED plans
        self._num_steps = 0

    def take_section(self, section: int) -> None:
        self.host_log.append(f"take {section}")

    def give_section(self, section: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.host_log.append(f"give {section}")

    def _begin(self, *arguments: Any) -> Any:
        return self.assistant.begin(*arguments)

    def _fetch(self, transfer: AdapterTransfer) -> AdapterLoad:
        self.host_log.append(f"fetch {transfer.transfer_id}")
        if isinstance(self.adapter, Exception):
            raise self.adapter
        return self.adapter if isinstance(self.adapter, Arriving) else ReadyLoad(self.adapter)

    def submit(self, *batches: SubBatch, **fields: Any) -> None:
        self._num_steps += 1
        self.executor.submit(StepPlan(StepId(self._num_steps), batches, **fields))

    def run(self, *batches: SubBatch, **fields: Any) -> list[Any]:
        self.submit(*batches, **fields)
        return self.executor.poll()

    def make_adapter(self, rank: int = 2) -> DeviceAdapter:
        generator = torch.Generator().manual_seed(rank)
        return DeviceAdapter(
            {
                target.index: self.loaded.lora_backend.pack(
                    torch.randn(rank, target.in_features, generator=generator),
                    torch.randn(target.out_features, rank, generator=generator),
                    1.0,
                )
                for target in self.loaded.target_map.targets
            }
        )


def new(request_id: int, prompt: tuple[int, ...], adapter: AdapterId = BASE_ADAPTER) -> NewRequest:
    return NewRequest(RequestId(request_id), prompt, GREEDY, adapter)


def blocks(request_id: int, *ids: int, first: int = 0) -> BlockUpdate:
    return BlockUpdate(RequestId(request_id), first, tuple(BlockId(i) for i in ids))


def rows(*columns: tuple[int, int, int, bool]) -> SubBatch:
    ids, starts, counts, samples = zip(*columns, strict=True)
    kind = SubBatchKind.DECODE if set(counts) == {1} else SubBatchKind.MIXED
    return SubBatch(kind, tuple(RequestId(i) for i in ids), starts, counts, samples)


def load(transfer_id: int, adapter_id: AdapterId = ADAPTER) -> AdapterTransfer:
    return AdapterTransfer(TransferId(transfer_id), adapter_id, 100)


def wait_progress(device: ExecutorDevice) -> None:
    """Poll until the first layers of an adapter have come."""
    for _ in range(3):
        results = device.executor.poll(timeout_s=10)
        if any(isinstance(result, TransferProgress) for result in results):
            return
    raise AssertionError("no layer came")


def wait_transfer(device: ExecutorDevice) -> TransferResult:
    """Poll until a transfer has ended; steps without rows end on the way."""
    for _ in range(3):
        for result in device.executor.poll(timeout_s=10):
            if isinstance(result, TransferResult):
                return result
            assert not isinstance(result, StepResult) or result.rows == ()
    raise AssertionError("no transfer ended")
