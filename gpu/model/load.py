"""Loads the text model of a checkpoint with corun's attention in place.

``skeleton.py`` refuses models that need no weights for the decision; the parity probe the rest.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...runtime.config.engine import DTYPES
from ...runtime.errors import ConfigError, ModelError
from .skeleton import build_skeleton, linears_for_conv1d, without_initial_values
from .source import ModelSource, describe, warn_of_adapter
from .weight_files import WeightFiles

_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if name != "auto"}


def resolve_device(name: str) -> torch.device:
    """Turn ``--device`` into a device; "auto" takes CUDA if available.

    Raises ``ConfigError`` if a CUDA device is configured that is not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {name}: PyTorch sees no CUDA device here; use --device cpu")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"--device {name}: PyTorch sees {count} CUDA devices here, numbered from 0")
    return device


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """Turn ``--dtype`` into a type.

    "auto" takes the checkpoint's (float32 if it names none), of quantised ones bfloat16.
    """
    if name != "auto":
        return _DTYPES[name]
    if getattr(config, "quantization_config", None) is not None:
        return torch.bfloat16
    dtype = getattr(config, "dtype", None) or torch.float32
    return dtype if dtype in _DTYPES.values() else torch.float32


def load_model(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    tensors: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load the weights with the registered attention function ``attention``.

    With a ``quantization_config`` transformers makes the modules that belong to it.

    ``tensors``: to be loaded instead of the files of ``source``, by their names on disk: tensors,
    or objects that slice into tensors. Raises ``ModelError`` naming the architecture and the
    reason.
    """
    warn_of_adapter(source)
    skeleton = build_skeleton(source, config, attention)
    is_quantized = getattr(config, "quantization_config", None) is not None
    with ExitStack() as stack:
        if tensors is None:
            files = WeightFiles(source)
            tensors = stack.enter_context(files.lazily(files.names))
        stack.enter_context(quiet_library())
        try:
            # Given a path, it would apply an adapter stored there.
            model, loading = without_initial_values(
                lambda: skeleton.model_class.from_pretrained(
                    None,
                    state_dict=dict(tensors),
                    config=skeleton.model.config,
                    dtype=dtype,
                    attn_implementation=attention,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    device_map={"": device} if is_quantized else None,  # it needs accelerate
                )
            )
        except ModelError:  # raised while reading a tensor
            raise
        except Exception as error:  # any error of the model's code and files
            raise ModelError(
                f"cannot load {source.path!r} ({describe(config)}): {type(error).__name__}: {error}"
            ) from error
    _check_sizes(source, loading["mismatched_keys"])
    _check_nothing_missing(source, loading["missing_keys"])
    model.requires_grad_(requires_grad=False)
    linears_for_conv1d(model)
    return model.eval().to(device)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep transformers' bars, warnings and tables of unused tensors off the terminal.

    ``on_progress`` reports progress instead, and errors report problems of a model.
    """
    was_enabled, verbosity = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _check_sizes(source: ModelSource, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse weights that the library initialised because the sizes in the files differ."""
    for name, found, expected in sorted(mismatched):
        raise ModelError(
            f"{name} of {source.path!r} is {list(found)}, but config.json asks for {list(expected)}"
        )


def _check_nothing_missing(source: ModelSource, missing: Iterable[str]) -> None:
    """Refuse weights that the library initialised because the files lack them."""
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelError(
            f"the weight files of {source.path!r} lack {', '.join(names[:3])}{more}; the model "
            "would answer from random values"
        )
