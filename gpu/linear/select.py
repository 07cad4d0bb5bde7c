"""Which backend computes the base model's linears: as told, or by a probe and a measurement."""

import logging
import time

import torch

from ...runtime.errors import ConfigError
from .base import LinearBackend, MakeLinear
from .onednn import OnednnLinear
from .plain import PlainLinear

_LOGGER = logging.getLogger(__name__)

_BACKENDS: dict[str, MakeLinear] = {"plain": PlainLinear, "onednn": OnednnLinear}
# A decode step of eight requests; larger than a core's second-level cache, as models are.
_PROBE_TOKENS = 8
_PROBE_FEATURES = 1024
_PROBE_ROUNDS = 7


def select_linear_backend(
    name: str, *, device: torch.device | str, dtype: torch.dtype
) -> MakeLinear:
    """Return what makes a backend from a weight and a bias.

    ``auto`` takes oneDNN's packed weights on the CPU where they give the right product and are not
    slower, else torch's linear. Raises ConfigError if a backend is asked for that cannot work here.
    """
    device = torch.device(device)
    if name not in {"auto", *_BACKENDS}:
        raise ConfigError(f"--linear-backend {name!r} is unknown; choose auto, onednn or plain")
    if name == "plain":
        return _chosen("plain", "as asked")
    reason = _why_not_onednn(device, dtype)
    if name == "onednn":
        if reason is not None:
            raise ConfigError(f"--linear-backend onednn cannot be used: {reason}")
        return _chosen("onednn", "as asked")
    if reason is not None:
        return _chosen("plain", reason)
    packed_ms, plain_ms = _measure_ms(dtype)
    figures = f"onednn {packed_ms:.3f} ms, plain {plain_ms:.3f} ms for {_PROBE_TOKENS} tokens"
    return _chosen("onednn" if packed_ms <= plain_ms else "plain", figures)


def _chosen(name: str, reason: str) -> MakeLinear:
    _LOGGER.info("linear backend: %s (%s)", name, reason)
    return _BACKENDS[name]


def _why_not_onednn(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why packed weights cannot be used here; None if they can. Compares one product."""
    if device.type != "cpu":
        return f"it is for the CPU, the model runs on {device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    weight, x = _probe_operands(64, dtype)
    bias = weight[:, 0].contiguous()
    try:
        product = OnednnLinear(weight, bias)(x)
    except (RuntimeError, AttributeError) as error:
        return f"oneDNN cannot pack {dtype}: {str(error).splitlines()[0]}"
    truth = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    # Rounding of the result, and of a float32 sum of 64 products that are below 16.
    tolerance = torch.finfo(dtype).eps * truth.abs() + 64 * 16 * torch.finfo(torch.float32).eps
    if not bool(((product.double() - truth).abs() <= tolerance).all()):
        return f"oneDNN's {dtype} product is wrong on this machine"
    return None


def _probe_operands(features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(features, features, generator=generator).clamp(-4, 4).to(dtype)
    x = torch.randn(_PROBE_TOKENS, features, generator=generator).clamp(-4, 4).to(dtype)
    return weight, x


def _measure_ms(dtype: torch.dtype) -> tuple[float, float]:
    """Best time of a product with packed and with plain weights, in turn."""
    weight, x = _probe_operands(_PROBE_FEATURES, dtype)
    backends: tuple[LinearBackend, ...] = (OnednnLinear(weight, None), PlainLinear(weight, None))
    best = [float("inf"), float("inf")]
    for _ in range(_PROBE_ROUNDS + 1):  # a first round that is slow does not matter to a minimum
        for index, backend in enumerate(backends):
            start = time.perf_counter()
            backend(x)
            best[index] = min(best[index], (time.perf_counter() - start) * 1e3)
    return best[0], best[1]
