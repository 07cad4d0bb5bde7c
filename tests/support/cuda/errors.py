"""Errors as torch raises them where CUDA has failed."""

import torch


def accelerator_error(code: int) -> torch.AcceleratorError:
    """CUDA has answered with ``code``."""
    error = torch.AcceleratorError(f"CUDA error: number {code}")
    error.error_code = code  # type: ignore[attr-defined]
    return error
