"""How fast are the base model's products on this machine, as a share of its limits?

The linears of a model of twelve layers with an output head, in bfloat16 (or ``--dtype``), with
every available back end, and batches from a decode step of one request to a chunk of a prompt. All
matrices are used in turn, as in a model, so they come from memory and not from a cache. Linears
with the same x are computed as in the engine, and corun's own kernels are called as in a replayed
decode pass, without Python between them. Two floors of the processor are measured for comparison,
see ``floors``: reading the weights once, and the multiplications in registers.

Memory speeds of a shared machine change within seconds. So the products and the floors are measured
in turn (ABBA), and the verdict is on the median share over pairs, with floors against floors as a
control. The last line is JSON.

With ``--quantization`` the first back end has the same matrices in 8 or 4 bits, beside bfloat16's.
One or two tokens are compared with reading its own bytes, 32 and more with the products of float32;
the floor of arithmetic is that of integer products.

    python bench/linear.py [--table] [--tokens 1 2 4 8 16 32 64 128] [--rounds 41]
    python bench/linear.py --threads 1
    python bench/linear.py --quantization int8
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numba
import torch
from corun.cpu_workers.kernels.simd.layout import CODED
from corun.gpu.forward.kernel_threads import set_kernel_threads
from corun.gpu.forward.launcher import launching
from corun.gpu.linear.base import LinearBackend, MakeLinear
from corun.gpu.linear.numba_backend import FusedProduct, KernelLinear, NumbaLinear
from corun.gpu.linear.quantized import quantize
from corun.gpu.linear.quantized_linear import TAGS, PackedWeight, QuantizedLinear
from corun.gpu.linear.select import select_linear_backend
from corun.gpu.replay.capture import Capture
from corun.gpu.replay.captured_pass import CapturedPass
from corun.runtime.config.engine import LINEAR_BACKENDS
from corun.runtime.errors import ConfigError
from floors import Clock, FloorMeter, Floors, least_s
from paired import MAX_CONTROL_SPREAD, ratio_of, report

Product = Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Shapes:
    """Frozen: figures of two runs compare only if these agree."""

    num_layers: int = 12
    hidden: int = 1024
    kv_features: int = 256
    intermediate: int = 2816
    vocabulary: int = 8192
    seed: int = 0

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Of the matrices that read the same x: inputs, and outputs of each."""
        h, kv, m = self.hidden, self.kv_features, self.intermediate
        layer = [(h, (h, kv, kv)), (h, (h,)), (h, (m, m)), (m, (h,))]
        return [*layer * self.num_layers, (h, (self.vocabulary,))]


# Of weights in so many bits: what a few tokens may take of the time to read them, and how many
# times faster than products of float32 many tokens must be.
_QUANTIZED_BOUNDS = {"int8": (1.25, 1.3), "int4": (1.3, 2.0), "w8a8": (1.25, 2.0)}


def _bits(quantization: str) -> int:
    """Bits of the codes of weights."""
    return CODED[TAGS[quantization].dtype.name].bits


class _MakeQuantized:
    """Makes linears of ``--quantization``'s weights, quantised here."""

    dtypes: frozenset[torch.dtype] | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearBackend:
        return QuantizedLinear(
            PackedWeight.of(quantize(weight, _bits(self.name)), is_w8a8=self.name == "w8a8"), bias
        )


def _makers(dtype: torch.dtype, quantization: str | None) -> list[MakeLinear]:
    """All backends that work here, corun's own first."""
    if quantization is not None:
        return [_MakeQuantized(quantization), NumbaLinear]
    makers = []
    for name in LINEAR_BACKENDS[1:]:
        try:
            makers.append(select_linear_backend(name, device="cpu", dtype=dtype))
        except ConfigError as error:
            print(error)
    return makers


def _together(matrices: list[LinearBackend]) -> Product:
    """What computes the matrices of a group as the engine does: at once if the backend can."""
    own = [matrix for matrix in matrices if isinstance(matrix, KernelLinear)]
    if len(own) == len(matrices):
        return FusedProduct(own)
    return lambda x: [matrix(x) for matrix in matrices]


def _walk_of(products: list[Product], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """What computes all groups, one after the other."""
    if not all(isinstance(product, FusedProduct) for product in products):
        return lambda: [product(x) for product, x in zip(products, inputs, strict=True)]
    capture = Capture()
    with launching(capture):
        for product, x in zip(products, inputs, strict=True):
            product(capture.keep_alive(x))
    captured = capture.end(inputs[0], inputs[0], inputs[0])
    assert isinstance(captured, CapturedPass), captured

    def replay() -> None:
        for part in captured.parts:  # what they read lives as long as the whole
            part.run()

    return replay


@dataclass
class _Rounds:
    """Milliseconds of each round: the floors before and after corun's own walk, and all walks."""

    floors: list[tuple[Floors, Floors]]
    walks: dict[str, list[float]]


def _measure(walks: dict[str, Callable[[], object]], rounds: int, clock: Clock, meter: FloorMeter) -> _Rounds:
    """All walks in turn; the first one between two measurements of the floors."""
    found = _Rounds([], {name: [] for name in walks})
    (own, walk), *others = walks.items()
    for _ in range(rounds):
        before = meter.once()
        found.walks[own].append(1e3 * least_s(walk, 1, clock))
        found.floors.append((before, meter.once()))
        for name, other in others:
            found.walks[name].append(1e3 * least_s(other, 1, clock))
    return found


def _judge(found: _Rounds, flops: float, num_bytes: float) -> tuple[dict[str, Any], bool]:
    """A row of figures, and whether the floors kept still enough to judge by them."""
    pairs = [[floors.least_ms(flops=flops, num_bytes=num_bytes) for floors in pair] for pair in found.floors]
    own = next(iter(found.walks.values()))
    control = ratio_of([before / after for before, after in pairs])

    def share_of(least_ms: Callable[[Floors], float]) -> Any:
        shares = [sum(map(least_ms, pair)) / 2 / ms for pair, ms in zip(found.floors, own, strict=True)]
        return ratio_of(shares).to_json()

    def median_ms(flops: float, num_bytes: float) -> float:
        each = [f.least_ms(flops=flops, num_bytes=num_bytes) for pair in found.floors for f in pair]
        return round(statistics.median(each), 2)

    row = {name: round(statistics.median(times), 2) for name, times in found.walks.items()}
    row |= {"memory floor": median_ms(0, num_bytes), "arithmetic floor": median_ms(flops, 0)}
    shares = {
        "share": share_of(lambda f: f.least_ms(flops=flops, num_bytes=num_bytes)),
        "share of memory": share_of(lambda f: f.least_ms(flops=0, num_bytes=num_bytes)),
        "over float32": share_of(lambda f: flops / f.float32_gflop_per_s / 1e6),
    }
    return {**row, **shares, "control": control.to_json()}, control.spread <= MAX_CONTROL_SPREAD


def _is_reached(row: dict[str, Any], tokens: int, quantization: str | None) -> bool | None:
    """Whether the first backend is as fast as it must be; None = nothing is asked."""
    if quantization is None:
        reached: bool = row["share"]["median"] >= _bound_of(tokens)
        return reached
    memory, float32 = _QUANTIZED_BOUNDS[quantization]
    if tokens <= 2:
        return bool(row["share of memory"]["median"] >= 1 / memory)
    return bool(row["over float32"]["median"] >= float32) if tokens >= 32 else None


def _bound_of(tokens: int) -> float:
    """The share of the floor that the first backend must reach."""
    if tokens <= 4:
        return 0.85
    if tokens <= 8:
        return 1 / 1.2
    return 0.88 if tokens < 128 else 0.92


def _table(figures: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Markdown: milliseconds of every batch size, and the first backend's share of its floor."""
    head = ["tokens", *names, "memory floor", "arithmetic floor", f"{names[0]}: share of the floor"]
    lines = [head, ["---"] * len(head)]
    for tokens, row in figures.items():
        values = [f"{row[name]:.1f}" for name in head[1:-1]]
        share = row["share"]
        described = f"{share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f})"
        lines.append([tokens, *values, described])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _backends(shapes: Shapes, dtype: torch.dtype, quantization: str | None) -> dict[str, list[Product]]:
    """The products of all groups by every back end."""
    torch.manual_seed(shapes.seed)
    makers = _makers(dtype, quantization)
    backends: dict[str, list[Product]] = {make.name: [] for make in makers}
    for in_features, outputs in shapes.groups():
        weights = [torch.randn(out, in_features).to(dtype) for out in outputs]
        for make in makers:
            backends[make.name].append(_together([make(weight, None) for weight in weights]))
    return backends


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=_QUANTIZED_BOUNDS, help="weights of 8 or 4 bits")
    parser.add_argument("--table", action="store_true", help="print the times as Markdown, too")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    set_kernel_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    shapes = Shapes()
    dtype = _dtype(arguments.dtype)
    quantization = arguments.quantization
    backends = _backends(shapes, dtype, quantization)
    tag = None if quantization is None else TAGS[quantization]
    meter = FloorMeter(arguments.threads, clock=clock, tag=tag)
    num_weights = sum(features * sum(outputs) for features, outputs in shapes.groups())
    num_bytes = float(dtype.itemsize * num_weights)
    if quantization is not None:
        coded = CODED[TAGS[quantization].dtype.name]
        num_bytes = num_weights * (coded.bits / 8 + coded.scale_bytes / coded.group_size)
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    widths = sorted({features for features, _ in shapes.groups()})
    with torch.inference_mode():
        for tokens in arguments.tokens:
            x_of = {features: torch.randn(tokens, features).to(dtype) for features in widths}
            inputs = [x_of[features] for features, _ in shapes.groups()]
            walks = {name: _walk_of(products, inputs) for name, products in backends.items()}
            found = _measure(walks, arguments.rounds, clock, meter)
            row, is_still = _judge(found, 2 * num_weights * tokens, num_bytes)
            figures[str(tokens)] = row
            if next(iter(walks)) in (NumbaLinear.name, quantization):
                is_reached = _is_reached(row, tokens, quantization)
                bounds[f"{tokens} tokens"] = is_reached if is_still else None
            described = ", ".join(f"{name} {value}" for name, value in row.items())
            print(f"{tokens:4} tokens, ms: {described}", flush=True)
    if arguments.table:
        print(_table(figures, list(backends)))
    figures["instructions"] = meter.floors.instructions
    report("linear", {**asdict(shapes), **vars(arguments)}, figures, bounds)


if __name__ == "__main__":
    main()
