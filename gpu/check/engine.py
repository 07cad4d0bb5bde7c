"""The product's executor over a model without files, for steps of any shape: nothing plans them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.config.engine import EngineConfig
from ...runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    BlockId,
    BlockUpdate,
    NewRequest,
    Outcome,
    RequestId,
    StepId,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
    TransferId,
    TransferResult,
)
from ...runtime.sampling import SamplingParams
from ..device.select import make_device
from ..execution import assemble
from ..execution.executor import AdapterFetch
from ..execution.sampler import Sampler
from ..forward.batch import StepContext
from ..lora.table import DeviceAdapter
from ..model.attention_hook import PagedAttentionHook

NUM_ROWS = 32
RANKS = (8, 16, 32, 64)  # of the adapters, in turn
_LAST = NUM_ROWS - 1  # the number of an adapter of the largest rank
_GREEDY = SamplingParams(temperature=0, max_tokens=32)
_LOAD_S = 60.0


@dataclass(frozen=True)
class Row:
    """One row of a step: ``num_tokens`` at the end of a context; rows of one token are answers."""

    context_len: int
    num_tokens: int = 1
    adapter: int | None = None  # an index of the engine's adapters; None = the base model
    sampling: SamplingParams = _GREEDY


# The steps whose work is counted without a GPU (tests/gpu/test_cuda_counts.py), and on one.
STEPS = {
    "base": [Row(512)] * NUM_ROWS,
    "adapters": [Row(512, adapter=number) for number in range(NUM_ROWS)],
    "one adapter": [Row(512, adapter=_LAST)] * NUM_ROWS,
    "one long context": [Row(32768), *[Row(512)] * _LAST],
    "prompt": [Row(512, 512, adapter=_LAST)],
}
SAMPLING = {
    "temperature": SamplingParams(temperature=1.0, max_tokens=32),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32),
    "penalties": SamplingParams(
        temperature=0.7, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, max_tokens=32
    ),
    "min_tokens": SamplingParams(temperature=0, min_tokens=31, max_tokens=32, stop_token_ids=(5,)),
    "logprobs": SamplingParams(temperature=0, logprobs=5, max_tokens=32),
    "all parameters": SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        min_tokens=31,
        max_tokens=32,
        logprobs=5,
        logit_bias={3: 1.0},
        allowed_token_ids=tuple(range(9)),
        bad_words_ids=((7,),),
    ),
}


class ReadyLoad:
    """A load of an adapter that is on the device already."""

    def __init__(self, adapter: DeviceAdapter) -> None:
        self._adapter = adapter

    def start(self, *, is_gradual: bool, runs: Sequence[range] = ()) -> None:
        """Nothing is copied."""

    def is_copying(self) -> bool:
        return False

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Nothing is read."""

    def reading(self) -> None:
        """Nothing is read."""

    def is_read(self) -> bool:
        return True

    def enqueue_all(self) -> None:
        """Nothing is left."""

    def advance(self) -> None:
        """Nothing is left."""

    def num_arrived(self) -> int:
        return 1

    def is_done(self) -> bool:
        return True

    def finish(self) -> DeviceAdapter:
        return self._adapter

    def cancel(self) -> None:
        """Nothing is borrowed."""


def load_random(
    config: Any, device: torch.device, on_progress: Callable[[str], None]
) -> assemble.LoadedModel:
    """A model of transformers' ``config`` with the library's initial values, equipped as a start does."""
    from transformers import AutoModelForCausalLM

    context = StepContext()
    hook = PagedAttentionHook(context)
    options: dict[str, Any] = {}
    if device.type == "cpu":  # the control flow: nothing is compiled
        backends = {"linear": "plain", "attention": "torch", "lora": "torch"}
        options = {**{f"{part}_backend": name for part, name in backends.items()}, "fused_kernels": "off"}
    engine = EngineConfig(model="random", device=device.type, dtype="bfloat16", **options)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=hook.name
        ).eval()
    model.requires_grad_(requires_grad=False)
    return assemble.equip(model, context, hook, make_device(device), engine, on_progress, None, None)


class StepEngine:
    """See the module. It has adapters for all linears of the layers, with random values."""

    def __init__(
        self,
        loaded: assemble.LoadedModel,
        ranks: Sequence[int],
        *,
        num_blocks: int,
        sampler: Sampler | None = None,
    ) -> None:
        """``ranks``: of its adapters; takes ownership of ``loaded``. Requests share the blocks."""
        self.loaded = loaded
        self.runner = assemble.make_runner(loaded, num_blocks)
        self._num_blocks = num_blocks
        self._adapters = [self._make_adapter(rank) for rank in ranks]
        self._executor = assemble.make_executor(
            loaded,
            self.runner,
            AdapterFetch(self._fetch, lambda _: None),
            sampler or Sampler((2,)),
            max_model_len=int(loaded.config.max_position_embeddings),
        )
        self._num_steps = self._num_requests = self._next_block = 0
        missing = len(ranks)
        self.submit(
            transfers=tuple(AdapterTransfer(TransferId(n), AdapterId(n), 1) for n in range(1, missing + 1))
        )
        deadline_s = time.monotonic() + _LOAD_S
        while missing:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{missing} adapters have not come in {_LOAD_S:.0f} s")
            ended = self._executor.poll(timeout_s=1)  # nothing: a load has begun
            missing -= sum(isinstance(result, TransferResult) for result in ended)

    @property
    def adapter_bytes(self) -> list[int]:
        """Bytes of each adapter on the device."""
        return [
            sum(packed.a.nbytes + packed.b.nbytes for packed in adapter.targets.values())
            for adapter in self._adapters
        ]

    @contextmanager
    def requests(self, batch: Sequence[Row], num_steps: int = 2) -> Iterator[Callable[..., None]]:
        """Announce a request for each row, for so many steps; they end with the context.

        Yields a function that computes step number ``n`` of them, one by one from 0 on: rows of one
        token go on by one token, others are computed again. With ``apart`` they are two passes.
        """
        ids = [RequestId(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        self.submit(
            new_requests=tuple(_announce(i, row) for i, row in zip(ids, batch, strict=True)),
            block_updates=tuple(self._blocks(i, row, num_steps) for i, row in zip(ids, batch, strict=True)),
        )

        def compute(n: int, *, apart: bool = False) -> None:
            rows = [
                (i, row.context_len - row.num_tokens - (row.num_tokens == 1) * (1 - n), row.num_tokens)
                for i, row in zip(ids, batch, strict=True)
            ]
            kinds = [[r for r in rows if r[2] == 1], [r for r in rows if r[2] > 1]] if apart else [rows]
            self.submit(*(_sub_batch(kind) for kind in kinds if kind))
            self._check_tokens(len(batch))

        yield compute
        self.submit(ended_requests=tuple(ids))

    def close(self) -> None:
        """Free everything."""
        self._executor.close()
        self.loaded.close()

    def _make_adapter(self, rank: int) -> DeviceAdapter:
        targets = {}
        for target in self.loaded.target_map.targets:
            if not (target.is_embedding or target.is_head):
                a = torch.randn(rank, target.in_features, device=self.runner.device)
                b = torch.randn(target.out_features, rank, device=self.runner.device)
                targets[target.index] = self.loaded.lora_backend.pack(a, b, 1e-3)
        return DeviceAdapter(targets)

    def _fetch(self, transfer: AdapterTransfer) -> ReadyLoad:
        return ReadyLoad(self._adapters[transfer.adapter_id - 1])

    def submit(self, *batches: SubBatch, **fields: Any) -> None:
        """Run the next plan: its sub-batches, and other fields of a ``StepPlan``."""
        self._num_steps += 1
        self._executor.submit(StepPlan(StepId(self._num_steps), batches, **fields))

    def _blocks(self, request_id: RequestId, row: Row, num_steps: int) -> BlockUpdate:
        count = -(-(row.context_len + num_steps - 1) // self.runner.block_size)
        first, self._next_block = self._next_block, (self._next_block + count) % self._num_blocks
        return BlockUpdate(
            request_id, 0, tuple(BlockId((first + i) % self._num_blocks) for i in range(count))
        )

    def _check_tokens(self, num_rows: int) -> None:
        (step,) = (r for r in self._executor.poll() if isinstance(r, StepResult) and r.rows)
        failed = [row.error for row in step.rows if row.outcome is not Outcome.TOKENS]
        if failed or len(step.rows) != num_rows:
            raise RuntimeError(f"{len(failed)} of {num_rows} rows have no token: {failed[:1]}")


def _announce(request_id: RequestId, row: Row) -> NewRequest:
    adapter = BASE_ADAPTER if row.adapter is None else AdapterId(row.adapter + 1)
    known = row.context_len - (row.num_tokens == 1)
    return NewRequest(request_id, (1,) * known, row.sampling, adapter)


def _sub_batch(rows: Sequence[tuple[RequestId, int, int]]) -> SubBatch:
    ids, starts, counts = zip(*rows, strict=True)
    kind = SubBatchKind.DECODE if set(counts) == {1} else SubBatchKind.MIXED
    return SubBatch(kind, ids, starts, counts, (True,) * len(rows))
