"""The values that each type can serve, compared with torch's conversions."""

import pytest
import torch
from corun.runtime.adapters.resolved import RawTensor
from corun.runtime.adapters.values import MAX_LOSS, check_values
from corun.runtime.errors import AdapterError

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
SCALES = [10.0**power for power in range(-12, 39, 3)]
BLOCK = 1 << 17


def problem(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    data = memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))
    raw = RawTensor("a", NAMES[tensor.dtype], tuple(tensor.shape), 0, len(data))
    try:
        check_values(raw, data, str(dtype).removeprefix("torch."))
    except AdapterError as error:
        return str(error)
    return None


def expected(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """By torch's own conversions, in double precision."""
    if not tensor.isfinite().all():
        return "not finite"
    served = tensor.to(dtype)
    if not served.isfinite().all():
        return "over the largest number"
    exact = tensor.double()
    if (served.double() - exact).norm() > MAX_LOSS * exact.norm():
        return "too small"
    return None


@pytest.mark.parametrize("served", NAMES)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_values_of_all_sizes(kind: torch.dtype, served: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    tensor = (torch.randn(33, 17, generator=generator, dtype=torch.double) * scale).to(kind)
    found, right = problem(tensor, served), expected(tensor, served)
    assert (found is None) == (right is None), found
    assert right is None or (found is not None and right in found)


@pytest.mark.parametrize(
    ("value", "served", "is_served"),
    [
        (65519.0, torch.float16, True),
        (65520.0, torch.float16, False),
        (3.3961e38, torch.bfloat16, True),
        # Half of the way to the next power of two, and the float32 below it.
        (float.fromhex("0x1.ffp+127"), torch.bfloat16, False),
        (float.fromhex("0x1.fefffep+127"), torch.bfloat16, True),
        (3.3962e38, torch.bfloat16, False),
        (3.4028e38, torch.float32, True),
    ],
)
def test_where_a_type_ends(value: float, served: torch.dtype, is_served: bool) -> None:
    tensor = torch.tensor([1.0, -value])
    assert bool(tensor.to(served).isfinite().all()) == is_served
    assert (problem(tensor, served) is None) == is_served


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
def test_one_wrong_value_anywhere(kind: torch.dtype, place: int) -> None:
    tensor = torch.zeros(2 * BLOCK + 3, dtype=kind)
    assert problem(tensor, torch.float16) is None
    tensor[place] = float("-inf")
    assert problem(tensor, torch.float16) == "a has values that are not finite (NaN or infinity)"


@pytest.mark.parametrize("kind", NAMES)
def test_a_tensor_without_values(kind: torch.dtype) -> None:
    assert problem(torch.zeros(0, 4, dtype=kind), torch.float16) is None
