"""Captures decode passes in CUDA graphs, for a few numbers of rows to which passes are padded.

A graph reads its inputs from tensors of its own, and its kernels have the grids of the largest pass
of its kind: programs without work return at once. Rows behind those of a pass are the base model's,
write no keys and values, and their logits are dropped.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch

from ..forward.batch import AttentionMetadata, LoraBatch, PassMetadata
from ..forward.launcher import Launcher, Thing, launching
from ..forward.lower import SHORT_PIECE
from ..lora.base import LoraBackend
from ..lora.deltas import ResidentDeltas
from .decode_graphs import DeltaSource, Kind, PassInputs, RunPass

_LOG = logging.getLogger(__name__)

# At most ``FEW_TOKENS`` of ``lower``, so that pieces are short.
_NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Contexts and ranks double from these on.
_LEAST_CONTEXT, _LEAST_RANK = 1024, 16
# Each graph takes up to 25 MiB of an 8B model's GPU. Kinds behind the limits run the modules.
_MAX_GRAPHS = 48
_LEAST_FREE_BYTES = 256 << 20
_NOWHERE = -1  # a slot to which nothing is written
# cuBLAS may choose another product under capture. Logits of the same products are equal.
_MAX_DIFFERENCE = 0.05  # of a row's largest logit


class Recorder(Protocol):
    """Records what a function enqueues."""

    def has_room(self) -> bool:
        """Whether the device has memory for one more recording."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record it without computing it; return what computes it.

        Raises ``RuntimeError`` if the function waits for the device.
        """


class StreamRecorder:
    """Captures from a stream; all its graphs share the memory of their intermediate values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def has_room(self) -> bool:
        """See ``Recorder``."""
        return torch.cuda.mem_get_info(self._device)[0] >= _LEAST_FREE_BYTES

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """See ``Recorder``."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads go on loading adapters meanwhile, and this one may take memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                self._end(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # torch does not end the capture's allocations then, and would free no block any more.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise


class _Size(NamedTuple):
    """The largest pass that a graph serves."""

    num_rows: int
    context_len: int  # of the longest context
    num_pieces: int  # of segments; 0 = without adapters
    max_rank: int

    @classmethod
    def of(cls, num_tokens: int, metadata: PassMetadata) -> Self:
        """Of the graph for a pass."""
        num_rows = next(number for number in _NUM_ROWS if number >= num_tokens)
        # No kernel was compiled for contexts that no request has.
        context_len = _doubled(_LEAST_CONTEXT, metadata.attention.max_context_len)
        context_len = min(context_len, metadata.most_context_len)
        if metadata.lora is None:
            return cls(num_rows, context_len, 0, 0)
        # Programs of pieces that are not there take time, too, and popular adapters have few pieces.
        few = -(-num_rows // SHORT_PIECE)
        num_pieces = few if metadata.lora.num_pieces <= few else num_rows
        return cls(num_rows, context_len, num_pieces, _doubled(_LEAST_RANK, metadata.lora.max_rank))


class _Inputs:
    """The tensors from which a graph reads a pass."""

    def __init__(self, size: _Size, block_size: int, device: torch.device) -> None:
        num_rows, context_len = size.num_rows, size.context_len
        options: Any = {"device": device, "dtype": torch.int32}
        rows = torch.arange(num_rows + 1, **options)
        self.input_ids = torch.zeros(1, num_rows, device=device, dtype=torch.int64)
        self.position_ids = torch.zeros_like(self.input_ids)
        self.logit_indices = rows[:-1].to(torch.int64)
        self.attention = AttentionMetadata(
            query_starts=rows,
            context_lens=torch.ones(num_rows, **options),
            block_tables=torch.zeros(num_rows, -(-context_len // block_size), **options),
            slot_mapping=torch.full((num_rows,), _NOWHERE, device=device, dtype=torch.int64),
            query_starts_host=tuple(range(num_rows + 1)),
            context_lens_host=(context_len,) * num_rows,
            max_query_len=1,
            min_query_len=1,
            max_context_len=context_len,
            block_size=block_size,
        )
        self._lora: LoraBatch | None = None
        if size.num_pieces:
            self._lora = LoraBatch(
                segment_starts=torch.zeros(size.num_pieces, **options),
                segment_ends=torch.zeros(size.num_pieces, **options),
                table_rows=torch.zeros(size.num_pieces, **options),
                segment_starts_host=(0,),
                segment_ends_host=(num_rows,),
                table_rows_host=(),
                max_piece_tokens=SHORT_PIECE,
                max_rank=size.max_rank,
            )

    def lora_of(self, metadata: PassMetadata) -> LoraBatch | None:
        """The batch here, for the adapters of a pass: their kernels depend on what they have."""
        if self._lora is None or metadata.lora is None:
            return None
        return replace(self._lora, table_rows_host=metadata.lora.table_rows_host)

    def fill(self, input_ids: torch.Tensor, position_ids: torch.Tensor, metadata: PassMetadata) -> None:
        """Copy a pass here; rows and pieces behind it compute nothing that is kept."""
        given, ours = metadata.attention, self.attention
        num_rows, num_columns = given.block_tables.shape
        self.input_ids[:, :num_rows].copy_(input_ids)
        self.position_ids[:, :num_rows].copy_(position_ids)
        _put(ours.context_lens, given.context_lens, 1)
        ours.block_tables[:num_rows, :num_columns].copy_(given.block_tables)
        _put(ours.slot_mapping, given.slot_mapping, _NOWHERE)
        if self._lora is not None and metadata.lora is not None:
            _put(self._lora.segment_starts, metadata.lora.segment_starts, 0)
            _put(self._lora.segment_ends, metadata.lora.segment_ends, 0)
            _put(self._lora.table_rows, metadata.lora.table_rows, 0)


def _put(whole: torch.Tensor, part: torch.Tensor, rest: int) -> None:
    whole[: len(part)].copy_(part)
    if len(part) < len(whole):
        whole[len(part) :].fill_(rest)


@dataclass(frozen=True, slots=True, eq=False)
class CudaGraph:
    """One captured pass; implements ``Graph``."""

    inputs: _Inputs
    lora_backend: LoraBackend | None
    logits: torch.Tensor  # [1, rows of the graph, vocabulary]
    run: Callable[[], None]
    kept: list[object]  # memory that the graph accesses

    def replay(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, metadata: PassMetadata
    ) -> torch.Tensor:
        """See ``Graph``."""
        self.inputs.fill(input_ids, position_ids, metadata)
        self.run()
        return self.logits[:, : input_ids.shape[1]]

    def compute(self, run_modules: RunPass, inputs: PassInputs) -> torch.Tensor:
        """See ``Graph``."""
        self.inputs.fill(inputs.input_ids, inputs.position_ids, inputs.metadata)
        logits = _compute(run_modules, self.inputs, self.lora_backend, inputs.metadata)
        return logits[:, : len(inputs.logit_indices)]


class _Watching(Launcher):
    """Notes what keeps a pass from being captured, and what its kernels access."""

    is_recording = True

    def __init__(self) -> None:
        self.kept: list[object] = []
        self.refusal: str | None = None

    def keep_alive(self, thing: Thing) -> Thing:
        self.kept.append(thing)
        return thing

    def call_in_every_pass(self, call: Callable[[], None]) -> None:
        self.refuse("a part of the pass needs Python")
        call()

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


class CudaGraphs:
    """Implements ``GraphDevice`` for CUDA."""

    def __init__(self, lora_backend: LoraBackend | None, recorder: Recorder) -> None:
        self._lora_backend = lora_backend
        self._recorder = recorder
        self._is_full = False
        self._kinds = set[Kind]()
        # Of all graphs, [1, most rows, vocabulary]: each result is read before the next pass.
        self._logits: torch.Tensor | None = None

    def kind(self, num_tokens: int, metadata: PassMetadata) -> Kind | None:
        """By rows, longest context, pieces and largest rank, rounded up."""
        deltas = DeltaSource.of(metadata)
        is_whole = metadata.outside == (False, False, 0)
        if num_tokens > _NUM_ROWS[-1] or deltas is DeltaSource.OTHER or not is_whole:
            return None
        kind = _Size.of(num_tokens, metadata), deltas
        return None if self._is_full and kind not in self._kinds else kind

    def capture(
        self, run_modules: RunPass, inputs: PassInputs
    ) -> tuple[torch.Tensor, CudaGraph | str | None]:
        """See ``GraphDevice``; the pass runs before, and makes all that is made once."""
        if len(self._kinds) < _MAX_GRAPHS and self._recorder.has_room():
            try:
                return self._capture(run_modules, inputs)
            except torch.OutOfMemoryError:
                pass  # the pass itself may fit, as it is not padded
        self._is_full = True
        _LOG.info(
            "decode graphs: no more are captured, %d are; other passes run the modules", len(self._kinds)
        )
        return run_modules(inputs), None

    def _capture(self, run_modules: RunPass, inputs: PassInputs) -> tuple[torch.Tensor, CudaGraph | str]:
        input_ids, position_ids, logit_indices, metadata = inputs
        size = _Size.of(input_ids.shape[1], metadata)
        padded = _Inputs(size, metadata.attention.block_size, input_ids.device)
        padded.fill(input_ids, position_ids, metadata)
        compute = partial(_compute, run_modules, padded, self._lora_backend, metadata)
        watching = _Watching()
        with launching(watching):
            logits = compute()
        wanted = logits[:, : len(logit_indices)]
        if watching.refusal is not None:
            return wanted, watching.refusal
        if self._logits is None:
            self._logits = logits.new_empty(1, _NUM_ROWS[-1], logits.shape[2])
        results = self._logits[:, : size.num_rows]
        try:
            run = self._recorder.record(lambda: results.copy_(compute()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return wanted, f"CUDA cannot capture the pass: {error}"
        self._kinds.add((size, DeltaSource.of(metadata)))
        return wanted, CudaGraph(padded, self._lora_backend, results, run, watching.kept)

    def difference(self, replayed: torch.Tensor, expected: torch.Tensor) -> str | None:
        """None if the logits are equal, or as near in each row as two products of cuBLAS are."""
        if torch.equal(replayed, expected):
            return None
        apart, size = (replayed.float() - expected.float()).abs(), expected.float().abs()
        share = float((apart.amax(-1) / size.amax(-1)).max())
        _LOG.info("decode graphs: a replay differs by %.2g of a row's largest logit", share)
        return None if share <= _MAX_DIFFERENCE else f", by {share:.3g} of the largest"


def _compute(
    run_modules: RunPass, inputs: _Inputs, lora_backend: LoraBackend | None, metadata: PassMetadata
) -> torch.Tensor:
    """Run the modules on ``inputs``, which hold the pass of ``metadata``."""
    lora, deltas = inputs.lora_of(metadata), None
    if lora is not None:
        assert lora_backend is not None
        deltas = ResidentDeltas(lora_backend, lora)
    padded = PassMetadata(inputs.attention, lora, deltas)
    return run_modules(PassInputs(inputs.input_ids, inputs.position_ids, inputs.logit_indices, padded))


def _doubled(least: int, number: int) -> int:
    """``least`` times the power of two that is enough for ``number``."""
    while least < number:
        least *= 2
    return least
