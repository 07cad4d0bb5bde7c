"""Chooses the back end of the base model's linears: as configured, or by probe and measurement.

Reads the weights that are served, for what is computed from them on the host.
"""

import itertools
import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...runtime.adapters.target_map import Target
from ...runtime.errors import ConfigError
from ...runtime.kept_records import read_record, write_record
from ..forward.kernel_threads import num_kernel_threads
from ..kept_choices import choice_path
from ..quiet_time import quiet_s, take_samples
from .base import LinearBackend, MakeLinear
from .numba_backend import NumbaLinear
from .onednn import OnednnLinear
from .plain import PlainLinear
from .quantized_linear import QuantizedLinear
from .wrapper import CorunLinear

_LOGGER = logging.getLogger(__name__)

# In order of preference.
BACKENDS: Mapping[str, MakeLinear] = {
    backend.name: backend for backend in (NumbaLinear, OnednnLinear, PlainLinear)
}
# Decode steps of one request and of eight, and a chunk of a prompt. The matrix is larger than a
# core's second-level cache, as in real models.
_MEASURED_TOKENS = (1, 8, 128)
_MEASURED_FEATURES = 1024
_MEASURED_TURNS = 5
_MEASURED_ROUNDS = 4
_WARM_UP_S = 0.01
_LIMIT_S = 0.2  # per size and turn, on a machine that is not quiet
# Minimal gain of a less preferred back end: less is noise, and successive starts would compute
# results with different rounding.
_MIN_GAIN = 0.1
_PROBE_FEATURES = 64
_PROBE_TOKENS = (1, 2, 11)


def select_linear_backend(
    name: str, *, device: torch.device | str, dtype: torch.dtype, kept: Path | None = None
) -> MakeLinear:
    """Return a function that makes a back end from a weight and a bias.

    ``auto`` takes, on the CPU, the fastest back end that gives the right product, and elsewhere
    torch's linear. If other processes disturb the measurement, it is the first one.
    ``kept``: the folder of stored measurements; None = nothing is stored.
    Raises ConfigError if the configured back end cannot work here. The probe compiles kernels.
    """
    device = torch.device(device)
    if name not in {"auto", *BACKENDS}:
        raise ConfigError(f"--linear-backend {name!r} is unknown; choose one of auto, {', '.join(BACKENDS)}")
    reasons = {
        candidate: _why_not(candidate, device, dtype)
        for candidate in (BACKENDS if name == "auto" else (name,))
    }
    if name != "auto":
        if reasons[name] is not None:
            raise ConfigError(f"--linear-backend {name} cannot be used: {reasons[name]}")
        return _chosen(name, "configured")
    refused = [f"not {other}: {reason}" for other, reason in reasons.items() if reason is not None]
    able = [candidate for candidate, reason in reasons.items() if reason is None]
    if len(able) == 1:
        return _chosen(able[0], "; ".join(refused))
    path = choice_path(kept, "linear", str(dtype), num_kernel_threads(), able)
    known = None if path is None else read_record(path, str)
    if known in able:
        return _chosen(known, "; ".join(["measured at an earlier start", *refused]))
    times = _measure_ms(able, dtype)
    if not all(map(math.isfinite, itertools.chain(*times.values()))):
        busy = "not measured, because others use the CPU cores"
        return _chosen(able[0], "; ".join([busy, *refused]))
    best = fastest(times)
    if path is not None:
        write_record(path, best, "the next start measures linear backends again")
    figures = [
        f"{candidate} {' and '.join(f'{value:.3f}' for value in times[candidate])} ms" for candidate in able
    ]
    sizes = " and ".join(str(tokens) for tokens in _MEASURED_TOKENS)
    return _chosen(best, "; ".join([f"{', '.join(figures)} for {sizes} tokens", *refused]))


def _chosen(name: str, reason: str) -> MakeLinear:
    _LOGGER.info("linear backend: %s (%s)", name, reason)
    return BACKENDS[name]


def fastest(times: Mapping[str, list[float]]) -> str:
    """The smallest product of times, that is geometric mean; the first one wins a tie."""
    best, *others = times
    for other in others:
        gain = 1 - (math.prod(times[other]) / math.prod(times[best])) ** (1 / len(times[best]))
        if gain > _MIN_GAIN:
            best = other
    return best


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a back end cannot be used here; None if it can. Compares a few products."""
    if name == "plain":
        return None
    if device.type != "cpu":
        return f"it supports only the CPU, the model runs on {device.type}"
    if name == "onednn" and not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    dtypes = BACKENDS[name].dtypes
    if dtypes is not None and dtype not in dtypes:
        return f"it supports {', '.join(sorted(map(str, dtypes)))}, the model is {dtype}"
    try:
        is_right = all(_is_right(name, dtype, tokens) for tokens in _PROBE_TOKENS)
    except Exception as error:  # any error of a compiler; the reason is logged or raised
        return f"its probe with {dtype} failed: {str(error).partition(chr(10))[0]}"
    return None if is_right else f"its {dtype} product is wrong on this machine"


def _is_right(name: str, dtype: torch.dtype, tokens: int) -> bool:
    weight, x = _operands(_PROBE_FEATURES, tokens, dtype)
    bias = weight[:, 0].contiguous()
    product = BACKENDS[name](weight, bias)(x)
    truth = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    # Rounding of the result, and of a float32 sum of 64 products that are below 16.
    tolerance = torch.finfo(dtype).eps * truth.abs()
    tolerance += _PROBE_FEATURES * 16 * torch.finfo(torch.float32).eps
    return bool(((product.double() - truth).abs() <= tolerance).all())


def _operands(features: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(features, features, generator=generator).clamp(-4, 4).to(dtype)
    x = torch.randn(tokens, features, generator=generator).clamp(-4, 4).to(dtype)
    return weight, x


def _measure_ms(names: list[str], dtype: torch.dtype) -> dict[str, list[float]]:
    """Quiet time of a product by back end and number of tokens; infinite if none was quiet.

    One back end after the other: helper threads of one library spin for milliseconds after its last
    product, on the cores of the next one, which is warmed up as long. There are several turns,
    because other machines of the host may use the memory during one.
    """
    weight, x = _operands(_MEASURED_FEATURES, max(_MEASURED_TOKENS), dtype)
    backends = {name: BACKENDS[name](weight, None) for name in names}
    best = {name: [math.inf] * len(_MEASURED_TOKENS) for name in names}
    for _ in range(_MEASURED_TURNS):
        for name, backend in backends.items():
            _warm_up(backend, x[: _MEASURED_TOKENS[0]])
            for size, tokens in enumerate(_MEASURED_TOKENS):
                samples = take_samples(partial(backend, x[:tokens]), _MEASURED_ROUNDS, _LIMIT_S)
                best[name][size] = min(best[name][size], quiet_s(samples) * 1e3)
    return best


def _warm_up(backend: LinearBackend, x: torch.Tensor) -> None:
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        backend(x)


class BaseReader:
    """Implements ``lora.factors.ReadBase``. Any thread may call it: weights do not change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Copies on it wait for nothing that passes have enqueued, and nothing waits for them.
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    def __call__(self, target: Target) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight [out_features, in_features] and bias of one target, in the host's memory.

        A quantised weight is dequantised without rounding.
        """
        linear = self._model.get_submodule(target.physical_path)
        assert isinstance(linear, CorunLinear), target.physical_path
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if isinstance(linear.backend, QuantizedLinear):
                weight = torch.from_numpy(linear.backend.packed.unpacked().dequantized())
            else:
                weight = linear.weight.cpu()
            bias = None if linear.bias is None else linear.bias.cpu()
        return weight, bias
