"""Products with quantised weights, against the dequantised ones in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.simd.isa import has_integer_dot
from corun.cpu_workers.kernels.simd.layout import INT4, MXFP4_LEVELS, NF4_LEVELS, Levels
from corun.gpu.forward.batch import StepContext
from corun.gpu.forward.kernel_threads import num_kernel_threads, set_kernel_helpers, set_kernel_threads
from corun.gpu.forward.launcher import launching
from corun.gpu.linear.base import LinearBackend
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.quantized import QuantizedWeight, quantize
from corun.gpu.linear.quantized_linear import PackedWeight, QuantizedLinear
from corun.gpu.linear.wrapper import InputGroup
from corun.gpu.replay.capture import Capture
from corun.gpu.replay.captured_pass import CapturedPass

GROUP = 64
# Weights, and whether they have zero points of their own.
KINDS = [
    ("int8", False),
    ("int4", False),
    ("int4", True),
    ("nf4", False),
    pytest.param("int8/32", False, marks=pytest.mark.full),
    ("int4/32", True),
    ("mxfp4", False),
    pytest.param(
        "w8a8",
        False,
        marks=pytest.mark.skipif(not has_integer_dot(), reason="this machine does not compute it"),
    ),
]
# The error of products over that of the weights alone, with outliers in x.
MAX_OVER_WEIGHTS = {
    "int8": 1.1,
    "int4": 1.05,
    "w8a8": 2.2,
    "nf4": 1.01,
    "int8/32": 1.1,
    "int4/32": 1.05,
    "mxfp4": 1.01,
}
LEVELS: dict[str, Levels] = {"nf4": NF4_LEVELS, "mxfp4": MXFP4_LEVELS}
X_BITS_8 = ("int4", "int4/32", "w8a8")
each_kind = pytest.mark.parametrize(("kind", "has_zeros"), KINDS)


def make_weight(shape: tuple[int, int], kind: str, has_zeros: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(shape[0])
    weight = 0.02 * torch.randn(shape, generator=generator)
    weight[0, :GROUP] = 0
    quantized = coded_weight(weight, kind)
    if kind == "mxfp4":  # also the smallest
        quantized.scales[0, 0] = 2.0**-127
    if not has_zeros:
        return quantized
    zeros = np.random.default_rng(0).integers(0, 16, quantized.scales.shape).astype(np.uint8)
    return replace(quantized, scales=short(quantized.scales), zero_points=zeros)


def short(scales: np.ndarray) -> np.ndarray:
    """Scales beside zero points have 16 bits."""
    return scales.astype(np.float16).astype(np.float32)


def group_size(kind: str) -> int:
    return 32 if kind.endswith("/32") or kind == "mxfp4" else GROUP


def coded_weight(weight: torch.Tensor, kind: str) -> QuantizedWeight:
    bits = 8 if kind in ("int8", "w8a8", "int8/32") else 4
    if kind.endswith("/32"):  # every group with itself again, as one of 64
        groups = weight.unflatten(1, (-1, 32))
        twice = quantize(groups.repeat(1, 1, 2).flatten(1), bits)
        first = twice.codes.reshape(len(weight), -1, GROUP)[..., :32].reshape(weight.shape)
        return QuantizedWeight(bits, first, twice.scales)
    if kind not in LEVELS:
        return quantize(weight, bits)
    groups = weight.unflatten(1, (-1, group_size(kind)))
    scales = groups.abs().amax(-1).clamp(min=1e-9)
    if kind == "mxfp4":
        scales = (scales.log2().floor() - 2).exp2()
    levels, order = torch.from_numpy(LEVELS[kind].values).sort()
    parts = (groups / scales[..., None]).contiguous()
    codes = order[torch.bucketize(parts, (levels[1:] + levels[:-1]) / 2)].byte()
    return QuantizedWeight(4, codes.flatten(1).numpy(), scales.numpy(), levels=LEVELS[kind])


def in_kernel(weight: QuantizedWeight) -> torch.Tensor:
    """The matrix with the kernel's levels, which are integers: float64."""
    if weight.levels is None:
        return torch.from_numpy(weight.dequantized()).double()
    unit, values = weight.levels.unit, weight.levels.values.astype(np.float64)
    levels = Levels(np.round(values * unit) / unit, unit, weight.levels.zero)
    assert np.abs(levels.values - values).max() < 0.00036
    return torch.from_numpy(replace(weight, levels=levels).dequantized())


@pytest.mark.parametrize("kind", ["int8", "int4", "int4/32", "mxfp4"])
def test_inputs_in_any_order(kind: str) -> None:
    """Equal to the bit to products with x in that order."""
    weight = make_weight((70, 192), kind, kind == "int4/32")
    order = np.random.default_rng(0).permutation(192).astype(np.int32)
    ordered = QuantizedLinear(packed(replace(weight, order=order), kind), None)
    plain = QuantizedLinear(packed(weight, kind), None)
    assert torch.equal(ordered.weight[:, torch.from_numpy(order)], plain.weight)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(600, 200, generator=generator).bfloat16()
    for tokens in (1, 2, 7, 130, 600):  # few: each thread makes rows of x for itself
        x = wide[:tokens, 3:195]
        assert torch.equal(ordered(x), plain(x[:, torch.from_numpy(order).long()].contiguous()))
    x[0, 5] = float("nan")
    assert bool(ordered(x)[0].isnan().all())


def packed(weight: QuantizedWeight, kind: str) -> PackedWeight:
    return PackedWeight.of(weight, is_w8a8=kind == "w8a8")


def make_linear(shape: tuple[int, int], kind: str, has_zeros: bool) -> QuantizedLinear:
    return QuantizedLinear(packed(make_weight(shape, kind, has_zeros), kind), None)


def coded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The kernel's rounded x: float64."""
    groups = x.double().unflatten(-1, (-1, group_size(kind)))
    steps = groups.abs().amax(dim=-1, keepdim=True) / (127 if kind in X_BITS_8 else 32767)
    codes = (groups / torch.where(steps == 0, 1, steps)).round()
    values: torch.Tensor = (codes * steps).reshape(x.shape)
    return values


@each_kind
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 64), (64, 64), (65, 192), (192, 320)])
def test_products_of_any_shape(out_features: int, in_features: int, kind: str, has_zeros: bool) -> None:
    weight = make_weight((out_features, in_features), kind, has_zeros)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(out_features, generator=generator).bfloat16()
    backend = QuantizedLinear(packed(weight, kind), bias)
    truth_weight = torch.from_numpy(weight.dequantized()).double()
    for tokens in (*range(14), 24, 33, 64, 130):
        x = torch.randn(tokens, in_features, generator=generator).bfloat16()
        y = backend(x)
        assert y.shape == (tokens, out_features)
        assert y.dtype == torch.bfloat16 and y.is_contiguous()
        truth = coded(x, kind) @ in_kernel(weight).t() + bias.double()
        # A value of x that lies between two codes may be rounded to the other one.
        step = float(x.abs().max()) / 127 if tokens and kind in X_BITS_8 else 0
        atol = 1e-4 + 2 * step * float(truth_weight.abs().max())
        torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=atol)
    assert torch.equal(backend.weight, truth_weight.bfloat16())


@each_kind
def test_the_error_is_that_of_the_weights(kind: str, has_zeros: bool) -> None:
    """For realistic values: features of very different sizes, and outliers."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(256, 512, generator=generator)
    quantized = coded_weight(weight, kind)
    if has_zeros:  # the same matrix, counted from elsewhere where no code is at its end
        groups = quantized.codes.reshape(256, -1, group_size(kind))
        shift = (groups.max(axis=-1) < 15).astype(np.uint8)
        codes = (groups + shift[..., None]).reshape(256, 512)
        scales, zeros = short(quantized.scales), shift + np.uint8(8)
        quantized = replace(quantized, codes=codes, scales=scales, zero_points=zeros)
    sizes = torch.exp(torch.randn(512, generator=generator))
    x = (torch.randn(96, 512, generator=generator) * sizes).bfloat16()
    x[:, 7] *= 100
    truth = x.double() @ weight.double().t()
    dequantized = torch.from_numpy(quantized.dequantized()).double()
    of_weights = (x.double() @ dequantized.t() - truth).norm()
    y = QuantizedLinear(packed(quantized, kind), None)(x)
    assert (y.double() - truth).norm() <= MAX_OVER_WEIGHTS[kind] * of_weights


@each_kind
def test_a_token_is_computed_the_same_with_any_number_of_others(kind: str, has_zeros: bool) -> None:
    backend = make_linear((192, 640), kind, has_zeros)
    x = torch.randn(37, 640, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = torch.cat([backend(x[token : token + 1]) for token in range(len(x))])
    for tokens in (*range(2, 20), 37):
        assert torch.equal(backend(x[:tokens]), alone[:tokens])


@each_kind
@pytest.mark.parametrize("tokens", [5, 130])  # few: each thread makes rows of x for itself
def test_products_of_any_number_of_threads(tokens: int, kind: str, has_zeros: bool) -> None:
    backend = make_linear((448, 512), kind, has_zeros)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = num_kernel_threads()
    results = []
    try:
        for num_threads in (1, 2):
            set_kernel_threads(num_threads)
            results.append(backend(x))
        set_kernel_helpers(1)
        results.append(backend(x))
    finally:
        set_kernel_helpers(0)
        set_kernel_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_makes_its_token_nan(value: float, kind: str, has_zeros: bool) -> None:
    backend = make_linear((64, 192), kind, has_zeros)
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean = backend(x)
    x[4, 100] = value
    y = backend(x)
    assert bool(y[4].isnan().all())
    others = [token for token in range(9) if token != 4]
    assert torch.equal(y[others], clean[others])


@each_kind
def test_zeros_and_what_is_nearly_zero(kind: str, has_zeros: bool) -> None:
    weight = make_weight((64, 192), kind, has_zeros)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0))
    backend = QuantizedLinear(packed(weight, kind), bias)
    x = torch.zeros(3, 192).bfloat16()
    x[1] = 1e-40  # its inverse is not finite
    assert torch.equal(backend(x), bias.bfloat16().expand(3, 64))
    # The largest values with a finite sum.
    x[2, :64] = torch.finfo(torch.bfloat16).max / 1024
    truth = x[2].double() @ in_kernel(weight).t()
    torch.testing.assert_close(backend(x)[2].double(), truth, rtol=2**-6, atol=1e30)


@pytest.mark.parametrize("exponent", [0, 1, 64, 127, 250])
def test_powers_of_two_from_the_smallest_on(exponent: int) -> None:
    codes = np.full((64, 64), 6, np.uint8)  # 4.0
    scales = np.full((64, 2), 2.0 ** (exponent - 127), np.float32)
    weight = QuantizedWeight(4, codes, scales, levels=MXFP4_LEVELS)
    x = torch.full((1, 64), 2.0 ** (127 - exponent)).bfloat16()
    y = QuantizedLinear(PackedWeight.of(weight), None)(x)
    assert torch.equal(y, torch.full((1, 64), 64 * 4.0).bfloat16())


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (2.0**-24, "int4"),  # the smallest float16
        (-65504.0, "int4"),  # its largest
        (2.0**-25, "int8"),
        (2.0**16, "int8"),
        (1 / 3, "int8"),
    ],
)
def test_scales_of_any_size(scale: float, name: str) -> None:
    codes = np.full((64, 128), 10, np.uint8)  # 2
    scales = np.full((64, 2), scale, np.float32)
    scales[::2, 1] = 0.75
    packed = PackedWeight.of(QuantizedWeight(4, codes, scales))
    assert packed.name == name
    assert np.array_equal(packed.unpacked().scales, scales)
    x = torch.zeros(6, 128).bfloat16()
    x[:, 0], x[:, 64] = 1 / scale, 4
    for tokens in (1, 6):
        y = QuantizedLinear(packed, None)(x[:tokens])
        second = torch.from_numpy(8 * scales[:, 1]).expand(tokens, 64)
        torch.testing.assert_close(y.float(), 2 + second, rtol=2**-7, atol=0)


@each_kind
def test_rows_with_gaps_of_which_nothing_else_is_read(kind: str, has_zeros: bool) -> None:
    backend = make_linear((64, 64), kind, has_zeros)
    wide = torch.full((11, 128), float("nan")).bfloat16()
    wide[:, 3:67] = torch.randn(11, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = wide[:, 3:67]
    assert torch.equal(backend(x), backend(x.contiguous()))


@each_kind
@pytest.mark.parametrize("tokens", [1, 6, 130])
def test_together_is_what_each_computes_alone(tokens: int, kind: str, has_zeros: bool) -> None:
    backends = [make_linear((width, 128), kind, has_zeros) for width in (70, 16, 64)]
    group = InputGroup(StepContext(), "qkv")
    for backend in backends:
        group.join(backend, None)
    group.fuse()
    x = torch.randn(1, tokens, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for member, backend in enumerate(backends):
        assert torch.equal(group.product(member, x), backend(x))


@pytest.mark.parametrize("seeds", [(1, 1, 1), (1, 2, 1), (1, None, 1)])
def test_a_group_may_have_several_orders(seeds: tuple[int | None, ...]) -> None:
    backends = []
    for width, seed in zip((70, 16, 64), seeds, strict=True):
        weight = make_weight((width, 128), "int4", False)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(128).astype(np.int32)
            weight = replace(weight, order=order)
        backends.append(QuantizedLinear(PackedWeight.of(weight), None))
    group = InputGroup(StepContext(), "qkv")
    for backend in backends:
        group.join(backend, None)
    group.fuse()
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for member, backend in enumerate(backends):
        assert torch.equal(group.product(member, x), backend(x))


@each_kind
def test_a_replay_computes_the_same(kind: str, has_zeros: bool) -> None:
    backend = make_linear((64, 128), kind, has_zeros)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = backend(x)
    capture = Capture()
    with launching(capture):
        y = backend(capture.keep_alive(x))
    captured = capture.end(x, x, x)
    assert isinstance(captured, CapturedPass), captured
    y.zero_()
    for part in captured.parts:
        part.run()
    assert torch.equal(y, expected)


def test_a_group_may_mix_what_is_quantised_and_what_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    full = NumbaLinear(torch.randn(64, 128, generator=generator).bfloat16(), None)
    quantized = [make_linear((width, 128), kind, False) for width, kind in ((64, "int8"), (16, "int4"))]
    backends: list[LinearBackend] = [quantized[0], full, quantized[1]]
    group = InputGroup(StepContext(), "qkv")
    for backend in backends:
        group.join(backend, None)
    group.fuse()
    x = torch.randn(1, 3, 128, generator=generator).bfloat16()
    for member, backend in enumerate(backends):
        assert torch.equal(group.product(member, x), backend(x))


def test_what_was_kept_may_be_read_only(tmp_path: Path) -> None:
    packed = PackedWeight.of(make_weight((128, 192), "int4", True))
    np.save(tmp_path / "blocks.npy", packed.blocks)
    blocks = np.load(tmp_path / "blocks.npy", mmap_mode="r")
    kept = PackedWeight(INT4, 128, 192, blocks, packed.beside)
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(QuantizedLinear(kept, None)(x), QuantizedLinear(packed, None)(x))
