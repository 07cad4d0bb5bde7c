"""Chooses the attention back end for a device and dtype by probing.

A candidate must reproduce the reference on a small problem, on this machine, with this dtype.
``auto`` takes the fastest candidate that passes, and logs why faster ones are not used. A back end
that was chosen by name and fails is an error.
"""

import logging

import numba
import torch

from ...runtime.config.engine import ATTENTION_BACKENDS
from ...runtime.errors import ConfigError
from .base import AttentionBackend
from .numba_backend import NumbaAttention
from .probe import LayerShape, max_probe_error, probe_tolerance
from .torch_backend import TorchAttention

_LOGGER = logging.getLogger(__name__)

_FLAG = "--attention-backend"


class _UnusableError(Exception):
    """A back end cannot serve this device and dtype; the message says why."""


def select_attention_backend(name: str, *, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Make the back end called ``name``, or for ``auto`` the fastest that works here.

    The kernels of the numba back end are compiled, or loaded from its cache, by this call.

    Raises:
        ConfigError: ``name`` is unknown, or is configured and does not work here.
    """
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise ConfigError(f"{_FLAG}: unknown back end {name!r}; choose one of {known}")
    if name == "auto":
        return _select_best(device, dtype)
    try:
        backend = _make_probed(name, device, dtype)
    except _UnusableError as error:
        raise ConfigError(
            f"{_FLAG} {name} does not work with {_setting(device, dtype)}: {error}; "
            f"leave {_FLAG} at auto or choose another"
        ) from error
    _LOGGER.info("attention: %s (configured)", name)
    return backend


def _select_best(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    fastest = "triton" if device.type == "cuda" else "numba"
    try:
        backend = _make_probed(fastest, device, dtype)
    except _UnusableError as error:
        _LOGGER.warning(
            "attention: torch for %s, which is slow, because %s does not work: %s",
            _setting(device, dtype),
            fastest,
            error,
        )
        return TorchAttention()
    _LOGGER.info("attention: %s (probed with %s)", fastest, _setting(device, dtype))
    return backend


def _make_probed(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Make a back end and compare it with the reference; raises ``_UnusableError``."""
    if name == "torch":
        return TorchAttention()
    backend = _make_numba(device, dtype) if name == "numba" else _make_triton(device, dtype)
    try:
        error = max_probe_error(backend, LayerShape(device, dtype))
    except Exception as failure:  # any error of a compiler or a driver
        raise _UnusableError(f"the probe failed: {type(failure).__name__}: {failure}") from failure
    tolerance = probe_tolerance(dtype)
    if not error <= tolerance:
        raise _UnusableError(f"the probe's error is {error:.3g}, above the limit of {tolerance:g}")
    if isinstance(backend, NumbaAttention):
        _log_threads(backend)
    return backend


def _log_threads(backend: NumbaAttention) -> None:
    layer, num_threads = backend.threading_layer, numba.get_num_threads()
    if layer == "workqueue":
        _LOGGER.warning(
            "attention: numba runs %d threads with its slow workqueue layer; install an OpenMP "
            "runtime (libgomp) for the omp layer",
            num_threads,
        )
        return
    _LOGGER.info("attention: numba runs %d threads with its %s layer", num_threads, layer)


def _make_numba(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if device.type != "cpu":
        raise _UnusableError("it supports only the CPU")
    if dtype not in {torch.float32, torch.bfloat16}:
        raise _UnusableError("it supports only float32 and bfloat16")
    return NumbaAttention()


def _make_triton(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if dtype not in {torch.float32, torch.float16, torch.bfloat16}:
        raise _UnusableError("it supports only float32, float16 and bfloat16")
    from .triton_backend import TritonAttention

    try:
        backend = TritonAttention(device)
    except ImportError as error:
        raise _UnusableError("Triton is not installed") from error
    if backend.is_interpreted:
        if dtype == torch.bfloat16:
            raise _UnusableError("Triton's interpreter gives wrong results for bfloat16")
    elif device.type != "cuda":
        raise _UnusableError("it needs a CUDA device, or TRITON_INTERPRET=1 to test without one")
    return backend


def _setting(device: torch.device, dtype: torch.dtype) -> str:
    return f"{device.type} and {str(dtype).removeprefix('torch.')}"
