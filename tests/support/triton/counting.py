"""Counts what code asks of a GPU without having one: fake CUDA tensors, and a stub of Triton.

Operations on fake tensors compute shapes and nothing else. A GPU's work is counted where torch and
Triton hand it over: kernels, copies between host and device, waits of the host for the device, and
the memory that tensors take. Operations of CPU tensors run as always, so that code between the
device's operations sees real values.

torch's own build for the CPU lacks one part that fake tensors of another device need: a guard
that selects the device. It takes four lines of C++, which are compiled (``load_guard``).
"""

import ctypes
import inspect
import subprocess
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.triton.program import cxx_compiler
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils
from triton.runtime.jit import JITFunction

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
"""
_CUDA = torch.device("cuda", 0)
# The host needs their results, so it waits for the device; what it reads is made up.
_READS = frozenset({"aten::equal", "aten::is_nonzero", "aten::_local_scalar_dense"})
_H100 = (9, 0)


def load_guard(directory: Path) -> None:
    """Compile the guard in ``directory`` and load it into this process, for good."""
    compiler = cxx_compiler()
    assert compiler is not None, "fake CUDA tensors need a C++ compiler"
    library = directory / "guard.so"
    installed = Path(torch.__file__).parent
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{installed / 'include'}",
            "-x",
            "c++",
            "-",
            f"-L{installed / 'lib'}",
            "-lc10",
            "-o",
            str(library),
        ],
        input=_GUARD,
        text=True,
        check=True,
        timeout=100,
    )
    ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel. A tensor among the arguments is kept as its dtype."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # by name, with the options of the compiler

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def num_programs(self) -> int:
        return int(torch.Size(self.grid).numel())


@dataclass(frozen=True)
class Copy:
    """One copy between host and device."""

    to_device: bool
    num_bytes: int
    is_blocking: bool
    is_pinned: bool  # the host's side; otherwise CUDA may wait although it was asked not to
    place: str


@dataclass
class Work:
    """What was asked of the device."""

    kernels: Counter[str] = field(default_factory=Counter)  # of torch, by operation
    launches: list[Launch] = field(default_factory=list)  # of Triton
    copies: list[Copy] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)  # of the host for the device, by place
    peak_bytes: int = 0  # tensors of the device made meanwhile, at once

    @property
    def num_launches(self) -> int:
        """Kernels of torch and of Triton."""
        return self.kernels.total() + len(self.launches)

    @property
    def num_waits(self) -> int:
        """Waits of the host for the device, blocking copies among them."""
        return self.waits.total()

    @property
    def copied_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies)


class FakeCuda:
    """Stands for a GPU in the calling thread, from ``fake_cuda`` on, and counts its work.

    ``work`` is what has been counted since the last ``begin`` or ``take``.
    """

    def __init__(self) -> None:
        self.work = Work()
        self._live: dict[int, int] = {}  # bytes of the device's memory, by its storage
        self._pinned: set[int] = set()
        self._bytes = self._first_bytes = 0

    def begin(self) -> None:
        self.work, self._first_bytes = Work(), self._bytes

    def take(self) -> Work:
        """Return what has been counted, and count on from nothing, except for memory."""
        work, self.work = self.work, Work(peak_bytes=self._bytes - self._first_bytes)
        return work

    def wait(self, *_: object, **__: object) -> None:
        """The host waits for the device."""
        self.work.waits[_place()] += 1

    def launch(self, kernel: Any, args: Sequence[Any], grid: Any, kwargs: dict[str, Any]) -> None:
        """Count a launch of Triton."""
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        arguments = {n: v.dtype if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        self.work.launches.append(Launch(kernel, tuple(grid), arguments))

    def copy(self, source: torch.Tensor, host: torch.Tensor, *, non_blocking: bool) -> None:
        """Count a copy from ``source``; ``host``: the side that is not on the device."""
        place, to_device = _place(), source.device.type != "cuda"
        self.work.copies.append(Copy(to_device, source.nbytes, not non_blocking, self.is_pinned(host), place))
        if not non_blocking:
            self.work.waits[place] += 1

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark memory of the host as pinned."""
        storage = tensor.untyped_storage()
        self._pinned.add(id(storage))
        weakref.finalize(storage, self._pinned.discard, id(storage))
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether memory of the host is pinned."""
        return id(tensor.untyped_storage()) in self._pinned

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor of the device, as long as it lives."""
        storage = tensor.untyped_storage()
        if id(storage) in self._live:
            return
        self._live[id(storage)] = storage.nbytes()
        self._bytes += storage.nbytes()
        self.work.peak_bytes = max(self.work.peak_bytes, self._bytes - self._first_bytes)
        weakref.finalize(storage, self._release, id(storage))

    def _release(self, key: int) -> None:
        self._bytes -= self._live.pop(key)


class _Operations(TorchDispatchMode):
    """Counts operations of the device, and lets those of the host run as always."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        leaves = tree_leaves((args, named))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if not any(map(_is_cuda, inputs)) and (target is None or target.type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **named)
        name = func.name()
        if name in _READS:
            self._gpu.wait()
            return made_up(inputs[0].dtype) if name == "aten::_local_scalar_dense" else True
        if name == "aten::_to_copy" and target and target.type != args[0].device.type:
            return self._copied(args[0], named)
        if name == "aten::copy_" and _is_cuda(args[0]) != _is_cuda(args[1]):
            return self._copied_into(*args)
        if func.namespace != "prim":  # a property of the tensor
            with self:
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        return self._computed(func, args, named, inputs)

    def _computed(self, func: Any, args: Sequence[Any], named: Any, inputs: Sequence[Any]) -> Any:
        out = func(*args, **named)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and _is_cuda(t)]
        for tensor in outputs:
            self._gpu.hold(tensor)
        name = func.overloadpacket.__name__
        memory = {id(tensor.untyped_storage()) for tensor in inputs}
        is_view = all(id(tensor.untyped_storage()) in memory for tensor in outputs)
        if outputs and (func._schema.is_mutable or not is_view) and "empty" not in name:
            self._gpu.work.kernels[name] += 1
        return out

    def _copied(self, source: torch.Tensor, named: Mapping[str, Any]) -> torch.Tensor:
        dtype = named.get("dtype") or source.dtype
        non_blocking = bool(named.get("non_blocking"))
        if _is_cuda(source):
            with unset_fake_temporarily():
                target = torch.full(source.shape, made_up(dtype), dtype=dtype)
            self._gpu.copy(source, target, non_blocking=non_blocking)
            return target
        self._gpu.copy(source, source, non_blocking=non_blocking)
        with self:
            return torch.empty(source.shape, dtype=dtype, device=_CUDA)

    def _copied_into(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        host = source if _is_cuda(target) else target
        self._gpu.copy(source, host, non_blocking=non_blocking)
        if host is target:
            with unset_fake_temporarily():
                target.fill_(made_up(target.dtype))
        return target


class _Functions(TorchFunctionMode):
    """What does not reach ``_Operations``, or needs a part that is not in every build of torch."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        is_pinned = named.pop("pin_memory", False)
        if func in {torch.tensor, torch.as_tensor}:
            device = named.pop("device", None)
            made = func(*args, **named)
            if is_pinned:
                self._gpu.pin(made)
            return made if device is None else made.to(device)
        if func is torch.Tensor.is_pinned:
            return self._gpu.is_pinned(args[0])
        if func is torch.Tensor.pin_memory:
            return self._gpu.pin(args[0].clone())
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return id(args[0].untyped_storage()) * 16 + args[0].storage_offset() * args[0].itemsize
        made = func(*args, **named)
        return self._gpu.pin(made) if is_pinned else made


def made_up(dtype: torch.dtype) -> bool | float | int:
    """The value of every element that the host reads."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _is_cuda(tensor: Any) -> bool:
    return bool(tensor.device.type == "cuda")


def _place() -> str:
    """File and line of the code that asks, of corun or of transformers."""
    frame = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "transformers" in path.parts or frame.f_globals["__name__"].startswith("corun."):
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class _Event:
    """An event of CUDA in which nothing ever is."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.synchronize = gpu.wait

    def record(self, stream: object = None) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        return True


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Let this thread have a GPU; ``load_guard`` comes first."""
    gpu = FakeCuda()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        gpu.launch(kernel, args, grid, kwargs)

    replaced: dict[str, Callable[..., Any]] = {
        "synchronize": gpu.wait,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: _H100,
        "Event": lambda *_, **__: _Event(gpu),
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        # It reads values one by one.
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda t: t.cpu().tolist()))
        # Otherwise transformers takes the paths of a compiler.
        stack.enter_context(mock.patch.object(import_utils, "is_fake_tensor", return_value=False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Functions(gpu))
        stack.enter_context(_Operations(gpu))
        stack.enter_context(torch.inference_mode())
        yield gpu
