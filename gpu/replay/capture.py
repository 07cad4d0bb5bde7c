"""Observes one pass of a model and records what it computes.

corun's kernels record themselves (``launcher``). Operations of torch are recorded where torch
dispatches them. Anything that cannot be repeated without Python is refused: values that Python code
reads from tensors, shapes that depend on values, random numbers. The pass itself then continues,
unrecorded.
"""

import struct
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..forward.batch import PassMetadata
from ..forward.kernel_threads import num_kernel_threads
from ..forward.launcher import Launcher, launching
from ..fused import residual
from .captured_pass import Callback, CapturedPass, KernelCalls, Part, TorchOperation
from .decode_graphs import DeltaSource, Kind, PassInputs, RunPass
from .replay_kernel import LETTERS, SIGNATURES

Thing = TypeVar("Thing")

# Tokens of a pass. With more, Python takes a small part of the time, and each graph needs memory.
_MAX_TOKENS = 32
_CACHE_LINE_BYTES = 64
_NOT_REPEATABLE = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
)
# The results of these have arbitrary values, so there is nothing to repeat.
_UNINITIALISED = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty"})
_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__})
_PACKED_AS = {
    "q": "q",
    "Q": "Q",
    "d": "d",
    "f": "f4x",
    "i": "i4x",
    "I": "I4x",
    "h": "h6x",
    "H": "H6x",
    "c": "b7x",
    "C": "B7x",
    "b": "?7x",
}


class OutputMemory:
    """Memory for kernels' results, reused when torch releases it.

    Only the kernels' calls refer to it meanwhile, and it is reused in their order.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)  # by bytes
        self._all: list[np.ndarray] = []

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with arbitrary values, aligned to a cache line."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        free = self._free[num_bytes]
        block = free.pop() if free else self._new_block(num_bytes)
        # Torch holds this view, not the block, until the last tensor on it is released.
        view = block.view()
        weakref.finalize(view, free.append, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _new_block(self, num_bytes: int) -> np.ndarray:
        memory = np.empty(num_bytes + _CACHE_LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % _CACHE_LINE_BYTES
        self._all.append(memory)
        return memory[start : start + num_bytes]


class Capture(Launcher):
    """One pass while it is being captured: records its calls."""

    is_recording = True

    def __init__(self) -> None:
        self.refusal: str | None = None  # an action of the pass that cannot be replayed
        self._parts: list[Part] = []
        self._is_paused = False
        self._memory = OutputMemory()
        self._kept: list[object] = [self._memory]
        self._preparations: dict[Hashable, Callable[[PassMetadata], None]] = {}

    # For the kernels.

    def launch(self, kernel: Any, *arguments: Any) -> None:
        kernel(*arguments)
        kinds = tuple(numba.typeof(argument) for argument in arguments)
        letters = "".join(LETTERS.get(kind, "?") for kind in kinds)
        if letters not in SIGNATURES:
            return self.refuse(f"a kernel is called with {kinds}")
        compiled = kernel.overloads[kinds]
        name = compiled.fndesc.llvm_cfunc_wrapper_name
        packed = struct.pack("<" + "".join(_PACKED_AS[letter] for letter in letters), *arguments)
        if not self._parts or not isinstance(self._parts[-1], KernelCalls):
            self._parts.append(KernelCalls())
        calls = self._parts[-1]
        assert isinstance(calls, KernelCalls)
        function = compiled.library.get_pointer_to_function(name)
        calls.append(SIGNATURES.index(letters), function, packed)

    def new_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.tensor(shape, dtype)

    def keep_alive(self, thing: Thing) -> Thing:
        self._kept.append(thing)
        return thing

    def call_in_every_pass(self, call: Callable[[], None]) -> None:
        self._parts.append(Callback(call))
        self._is_paused = True
        try:
            with launching(Launcher()):
                call()
        finally:
            self._is_paused = False

    @property
    def is_watching(self) -> bool:
        """Whether current computations belong to the graph."""
        return self.refusal is None and not self._is_paused

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def before_replay(self, key: Hashable, prepare: Callable[[PassMetadata], None]) -> None:
        self._preparations.setdefault(key, prepare)

    # For torch.

    def operation(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call an operation of torch and record how to repeat it."""
        if not self.is_watching:
            return function(*arguments, **named)
        if function is torch.ops.aten.add.Tensor and not named and residual.can_add(arguments):
            return residual.add(*arguments)
        returned = function(*arguments, **named)
        tags = _NOT_REPEATABLE.intersection(function.tags)
        if tags and not _is_harmless(function, arguments):
            self.refuse(f"{function} is {', '.join(tag.name for tag in tags)}")
        elif not _is_of_tensors(returned):
            self.refuse(f"{function} returns {type(returned).__name__}")
        elif function._schema.name in _UNINITIALISED:
            self.keep_alive(returned)
        else:
            self._record_operation(function, arguments, named, returned)
        return returned

    def _record_operation(
        self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], returned: Any
    ) -> None:
        """Record an operation, unless it only made views."""
        is_writing = function._schema.is_mutable
        results = () if is_writing else tuple(_new_tensors(returned, (arguments, named)))
        if results and len(results) != sum(1 for _ in _tensors(returned)):
            self.refuse(f"{function} returns views and new tensors")
        elif is_writing or results:
            self._parts.append(TorchOperation(function, arguments, named, results))

    def end(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits: torch.Tensor
    ) -> CapturedPass | str:
        """The captured pass, or the reason why there is none."""
        return self.refusal or CapturedPass(
            input_ids, position_ids, logits, self._parts, tuple(self._preparations.values()), self._kept
        )


class _WatchReads(TorchFunctionMode):
    """Refuses reads of a tensor's values that compute nothing."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and self._capture.is_watching:
            self._capture.refuse(f"Tensor.{func.__name__} reads values")
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Passes torch's operations of this thread to a capture."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch excludes the method below from compilation, which imports its compiler.

        The import takes 100 MiB, and 0.7 s of the first request.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._capture.operation(func, args, kwargs or {})


def capture_pass(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
) -> tuple[torch.Tensor, CapturedPass | str]:
    """Run a pass once, and capture it; returns its logits, and the reason if there is no graph."""
    capture = Capture()
    input_ids, position_ids = input_ids.clone(), position_ids.clone()
    with launching(capture), _WatchReads(capture), _Watch(capture):
        logits = run(input_ids, position_ids)
    return logits, capture.end(input_ids, position_ids, logits)


class CpuGraphs:
    """Implements ``GraphDevice`` for the CPU."""

    def kind(self, num_tokens: int, metadata: PassMetadata) -> Kind | None:
        """By tokens, threads of the kernels and ``PassMetadata.outside``."""
        if num_tokens > _MAX_TOKENS:
            return None
        return (num_tokens, num_kernel_threads(), metadata.outside), DeltaSource.of(metadata)

    def capture(self, run_modules: RunPass, inputs: PassInputs) -> tuple[torch.Tensor, CapturedPass | str]:
        """See ``GraphDevice``."""
        return capture_pass(
            lambda ids, positions: run_modules(inputs._replace(input_ids=ids, position_ids=positions)),
            inputs.input_ids,
            inputs.position_ids,
        )

    def difference(self, replayed: torch.Tensor, expected: torch.Tensor) -> str | None:
        """None if all bits are equal."""
        is_same = torch.equal(replayed.view(torch.uint8), expected.view(torch.uint8))
        return None if is_same else ""


def _is_of_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_of_tensors(item) for item in value)
    return value is None or isinstance(value, torch.Tensor)


def _is_harmless(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a call can be repeated although the operation cannot with other arguments."""
    if function is torch.ops.aten.index.Tensor:  # only masks make the shape depend on values
        indices = _tensors(arguments[1])
        return all(index.dtype not in (torch.bool, torch.uint8) for index in indices)
    is_dropout = function is torch.ops.aten.dropout.default
    return is_dropout and len(arguments) == 3 and not arguments[2]  # input, share, is training


def _new_tensors(returned: Any, given: Any) -> Iterator[torch.Tensor]:
    """The returned tensors that are not views of the arguments."""
    # Weights packed by oneDNN are opaque, and have no views.
    known = {t.untyped_storage().data_ptr() for t in _tensors(given) if not t.is_mkldnn}
    for tensor in _tensors(returned):
        if tensor.untyped_storage().data_ptr() not in known:
            yield tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
