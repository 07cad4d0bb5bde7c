"""Values of files in the type of the served model."""

import pytest
import torch
from corun.gpu.lora.convert import to_tensor
from corun.runtime.adapters.resolved import RawTensor
from corun.runtime.errors import AdapterError

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def stored(tensor: torch.Tensor) -> tuple[RawTensor, memoryview]:
    data = bytearray(tensor.view(torch.uint8).numpy().tobytes())
    return RawTensor("a", NAMES[tensor.dtype], tuple(tensor.shape), 0, len(data)), memoryview(data)


@pytest.mark.parametrize("served", NAMES)
@pytest.mark.parametrize("kind", NAMES)
def test_types_of_the_file(kind: torch.dtype, served: torch.dtype) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(kind)
    found = to_tensor(*stored(tensor), served)
    assert found.dtype == served
    assert torch.equal(found, tensor.to(served))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", NAMES)
def test_values_that_are_not_finite(value: float, kind: torch.dtype) -> None:
    tensor = torch.ones(9, 33)
    tensor[4, 20] = value
    raw = stored(tensor.to(kind))
    with pytest.raises(AdapterError, match="a has values that are not finite"):
        to_tensor(*raw, torch.float32)


@pytest.mark.parametrize("size", [1e-7, 1e-10, 1e-40])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_matrices_that_float16_would_lose(size: float, kind: torch.dtype) -> None:
    raw = stored((normal() * size).to(kind))
    with pytest.raises(AdapterError, match=r"a has .* too small for torch.float16, .*--dtype"):
        to_tensor(*raw, torch.float16)
    for dtype in (torch.bfloat16, torch.float32):
        assert to_tensor(*raw, dtype).any()


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-5, 2e-6])
def test_small_values_of_ordinary_matrices_are_served(size: float) -> None:
    """Some of their values become zero, which make no difference."""
    tensor = normal() * size
    tensor[:, ::2] *= 1e-5
    found = to_tensor(*stored(tensor), torch.float16)
    assert (found == 0).any()
    assert (found.float() - tensor).norm() < 0.01 * tensor.norm()


def test_matrices_of_zeros_are_served() -> None:
    assert not to_tensor(*stored(torch.zeros(3, 4)), torch.float16).any()


def normal() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def test_values_over_the_range_of_the_served_type() -> None:
    raw = stored(torch.tensor([[1.0, -1e6]]))
    with pytest.raises(AdapterError, match=r"a has the value 1e\+06, over .* torch.float16 .*--dtype"):
        to_tensor(*raw, torch.float16)
    assert to_tensor(*raw, torch.bfloat16).shape == (1, 2)
