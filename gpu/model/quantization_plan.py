"""Decides what of a model is quantised, and the type of everything else."""

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from ...cpu_workers.kernels.simd.isa import has_integer_dot
from ...cpu_workers.kernels.simd.layout import GROUP_SIZE
from ...runtime.config.engine import OFF, EngineConfig
from ...runtime.errors import ConfigError
from .stored_quantization import BITSANDBYTES, StoredQuantization, read_stored_quantization

_LOG = logging.getLogger(__name__)

# By method: the packages with which transformers makes modules of its linears. Other methods have
# none, or modules that dequantise all of a matrix at the first product.
MODULE_PACKAGES = {
    BITSANDBYTES: ("accelerate", "bitsandbytes"),
    "fp8": ("accelerate", "kernels"),
    "gptq": ("accelerate", "gptqmodel", "optimum"),
    "awq": ("accelerate", "gptqmodel"),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which linears get how many bits."""

    bits: int | None  # of linears that are not quantised yet; None = unchanged
    head_bits: int | None  # of lm_head, likewise
    stored: StoredQuantization | None  # the checkpoint's own quantisation
    is_w8a8: bool = False  # products of weights in 8 bits round their inputs to 8 bits, too
    keeps_levels: bool = False  # codes that name levels are served as stored, where they can be
    has_modules: bool = False  # linears are modules of the checkpoint's own library

    @property
    def stored_bits(self) -> frozenset[int]:
        """Bits of the checkpoint's integers that are served as stored."""
        return self.stored.bits if self.stored and not self.stored.in_full else frozenset()

    @property
    def has_integers(self) -> bool:
        """Whether any linear is served in 8 or 4 bits."""
        return bool(self.bits or self.head_bits or self.stored_bits or self.keeps_levels)

    @property
    def label(self) -> str:
        """Identifies the conversion of the weights, besides their files."""
        stored = " as stored" if self.stored_bits or self.keeps_levels else ""
        stored = " as modules" if self.has_modules else stored
        inputs = ", inputs 8" if self.is_w8a8 else ""
        linears = f"linears {self.bits}{stored}, head {self.head_bits}"
        return f"{linears}, in groups of {GROUP_SIZE} or as stored{inputs}"

    def name_of(self, bits: int) -> str:
        """How matrices of so many bits are named."""
        return _W8A8 if bits == 8 and self.is_w8a8 else f"int{bits}"


def plan_quantization(config: EngineConfig, hf_config: Any, device: torch.device) -> Quantization | None:
    """Decide what is quantised; None if nothing.

    Raises ``ConfigError`` for options that contradict the device or the checkpoint, ``ModelError``
    for an unsupported quantised checkpoint.
    """
    stored = read_stored_quantization(hf_config)
    asked, head = config.quantization, config.lm_head_quantization
    has_levels = stored is not None and bool(stored.levels)
    # The kernel computes in bfloat16; other types and devices get full matrices.
    has_kernel = device.type == "cpu" and config.dtype in ("auto", "bfloat16")
    keeps_levels = has_levels and asked is None and has_kernel
    has_modules = False
    if stored is not None and (asked == OFF or device.type != "cpu"):
        stored = replace(stored, in_full=True)
        has_modules = asked is None and stored.method in MODULE_PACKAGES
    if asked == OFF:
        asked = None
    if asked == _W8A8 and not has_integer_dot():
        raise ConfigError(
            "--quantization w8a8 needs a processor that adds products of bytes (AVX-512 VNNI or "
            "AVX-VNNI), and no lower --cpu-isa; use int8"
        )
    bits = None if asked is None else _BITS[asked]
    if stored is None and asked is None:
        if head in _BITS:
            raise ConfigError(
                f"--lm-head-quantization {head} needs --quantization, or a quantised checkpoint"
            )
        return None
    is_kept = stored is not None and not stored.in_full
    if stored is not None and is_kept and bits is not None:
        if stored.bits != {bits}:
            found = " and ".join(f"int{bits}" for bits in sorted(stored.bits))
            raise ConfigError(
                f"--quantization is {asked}, but the checkpoint is already in {found} "
                f"({stored.method}); leave it out"
            )
        bits = None
    head_bits = 8 if head == "auto" and bits is not None else _BITS.get(head)
    plan = Quantization(
        bits, head_bits, stored, is_w8a8=asked == _W8A8, keeps_levels=keeps_levels, has_modules=has_modules
    )
    if plan.has_integers and device.type != "cpu":
        what = f"--quantization {asked}" if asked else f"--lm-head-quantization {head}"
        raise ConfigError(f"{what} is supported only on the CPU; use --device cpu")
    if stored is not None and has_modules:
        _check_packages(stored.method)
    return plan


def _check_packages(method: str) -> None:
    missing = [name for name in MODULE_PACKAGES[method] if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a checkpoint of {method} needs {' and '.join(missing)} on CUDA: pip install "
            f"{' '.join(missing)}, or use --quantization off, which reads it in full"
        )


_W8A8 = "w8a8"
_BITS = {"int8": 8, "int4": 4, _W8A8: 8}


def check_dtype(dtype: torch.dtype, plan: Quantization, *, is_chosen: bool) -> torch.dtype:
    """The dtype in which a quantised model computes, besides its integers.

    ``dtype``: the dtype without quantisation; ``is_chosen``: set by the user, and then used.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bfloat16:
        return dtype
    if is_chosen:
        if plan.has_integers:
            _LOG.warning(
                "--dtype %s with quantised weights dequantises them for each product, which is "
                "exact, but many times slower than --dtype bfloat16",
                name,
            )
        return dtype
    _LOG.info("the model's type is %s; with quantised weights it is served in bfloat16", name)
    return torch.bfloat16
