"""A decode batch costs the same number of calls for any number of rows."""

import sys
from typing import Any

import pytest
from corun.gpu.attention.base import AttentionBackend
from corun.gpu.attention.numba_backend import NumbaAttention
from corun.gpu.attention.torch_backend import TorchAttention
from support.attention import Call, Problem, make_call
from torch.utils._python_dispatch import TorchDispatchMode

BACKENDS = [TorchAttention, NumbaAttention]


class _CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def _count_ops(backend: AttentionBackend, call: Call) -> int:
    with _CountOps() as counter:
        backend.forward(*call.arguments())
    return int(counter.num_ops)


def _count_python_calls(backend: AttentionBackend, call: Call) -> int:
    """Calls of Python and C functions during one forward with new metadata."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in {"call", "c_call"}

    arguments = call.arguments()
    sys.setprofile(count)
    try:
        backend.forward(*arguments)
    finally:
        sys.setprofile(None)
    return num_calls


def _decode_call(num_rows: int) -> Call:
    context_lens = tuple(20 + row for row in range(num_rows))
    return make_call(Problem((1,) * num_rows, context_lens))


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_torch_operations_do_not_grow_with_rows(make_backend: type[Any]) -> None:
    backend = make_backend()
    counts = [_count_ops(backend, _decode_call(num_rows)) for num_rows in (2, 3, 24)]
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_python_calls_do_not_grow_with_rows(make_backend: type[Any]) -> None:
    backend = make_backend()
    # The first call compiles and allocates.
    _count_python_calls(backend, _decode_call(24))
    counts = [_count_python_calls(backend, _decode_call(num_rows)) for num_rows in (2, 3, 24)]
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts


def test_layers_of_a_pass_share_one_plan_and_its_masks() -> None:
    backend = NumbaAttention()
    call = make_call(Problem((20, 1), (50, 17)))
    first = _count_python_calls(backend, call)
    second = _count_python_calls(backend, call)
    assert second < first
    assert _count_python_calls(backend, call) == second
