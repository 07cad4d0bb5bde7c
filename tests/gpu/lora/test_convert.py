"""Values of files in the type that they are served in."""

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
    with pytest.raises(AdapterError, match="a holds values that are not finite"):
        to_tensor(*raw, torch.float32)


def test_values_over_the_range_of_the_served_type() -> None:
    raw = stored(torch.tensor([[1.0, -1e6]]))
    with pytest.raises(AdapterError, match=r"a holds 1e\+06, over .* torch.float16 .*--dtype"):
        to_tensor(*raw, torch.float16)
    assert to_tensor(*raw, torch.bfloat16).shape == (1, 2)
