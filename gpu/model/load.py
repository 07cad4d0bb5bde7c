"""Loads a causal language model of transformers with corun's attention in place.

Owns what can be refused before a forward pass; the parity probe refuses the rest.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...runtime.config.engine import DTYPES
from ...runtime.errors import ConfigError, ModelError
from .source import ModelSource, describe

_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if name != "auto"
}
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def resolve_device(name: str) -> torch.device:
    """Turn ``--device`` into a device; "auto" takes CUDA where there is one.

    Raises ``ConfigError`` if CUDA is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """Turn ``--dtype`` into a type; "auto" takes the checkpoint's (float32 if it names none)."""
    if name != "auto":
        return _DTYPES[name]
    dtype = getattr(config, "dtype", None) or torch.float32
    return dtype if dtype in _DTYPES.values() else torch.float32


@dataclass(frozen=True, slots=True)
class RestOfModel:
    """A model of which some has been put aside."""

    model_class: type[PreTrainedModel]
    tensors: Mapping[str, Any]  # by their names on disk: tensors, or what slices into tensors


def load_model(
    source: ModelSource, config: Any, dtype: torch.dtype, device: torch.device, attention: str,
    rest: RestOfModel | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Load the weights with the registered attention function ``attention``.

    ``rest``: what to load in place of the files of ``source``. Raises ``ModelError`` naming the
    architecture and the reason.
    """
    _check_layer_types(config)
    _check_weight_files(source)
    options = {
        "config": config, "dtype": dtype, "attn_implementation": attention,
        "output_loading_info": True,
    }  # fmt: skip
    try:
        with _no_progress_bars():
            if rest is None:
                model, loading = AutoModelForCausalLM.from_pretrained(
                    source.path, use_safetensors=True, **options, **source.hub_arguments()
                )
            else:
                model, loading = rest.model_class.from_pretrained(
                    None, state_dict=dict(rest.tensors), **options
                )
    except Exception as error:  # foreign code and files: whatever it raises, nothing can be served
        reason = f"{type(error).__name__}: {error}"
        if attention in reason:  # its attention classes are a fixed table of its own
            reason = "its attention does not go through transformers' attention interface"
        raise ModelError(f"cannot load {source.path!r} ({describe(config)}): {reason}") from error
    _check_nothing_missing(source, loading["missing_keys"])
    model.requires_grad_(requires_grad=False)
    return model.eval().to(device)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep the library's bars off the terminal; what is being done is told by ``on_progress``."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _check_weight_files(source: ModelSource) -> None:
    """Refuse pickled weights by name: loading them can run any code."""
    directory = Path(source.path)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        pickled = sorted(file.name for file in directory.glob("*.bin"))
        found = f", only {pickled[0]}, which corun does not load" if pickled else ""
        raise ModelError(
            f"{source.path!r} holds no weights in *.safetensors{found}; save the model again with "
            "transformers' save_pretrained"
        )


def _check_nothing_missing(source: ModelSource, missing: Iterable[str]) -> None:
    """Refuse weights that the library made up because the files lack them."""
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelError(
            f"the weight files of {source.path!r} lack {', '.join(names[:3])}{more}; the model "
            "would answer from random values"
        )


def _check_layer_types(config: Any) -> None:
    """Refuse layers whose state is not keys and values in the pool."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise ModelError(
            f"{describe(config)} has layers of type {', '.join(sorted(kinds))}; corun serves "
            "full_attention and sliding_attention only, others keep state outside the KV pool"
        )
