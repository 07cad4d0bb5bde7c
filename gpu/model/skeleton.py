"""Builds a model's modules without its weights, or gives the reason why it is not supported.

Used by both ``corun serve`` and ``corun check``, so that they agree.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from ...runtime.adapters.target_map import TargetMap
from ...runtime.errors import ModelError
from ..forward.batch import StepContext
from .attention_hook import PagedAttentionHook
from .fingerprint import code_files
from .probe import record_attention
from .source import ModelSource, describe, load_config, warn_of_adapter
from .stored_quantization import read_stored_quantization
from .targets import LeftOut, build_target_map, embeds_own_tokens, find_layers, record_calls, with_calls

_T = TypeVar("_T")
_BIDIRECTIONAL = "use_bidirectional_attention"
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


# A model without these parts gives the same answers to text. One that needs them for text fails in
# the first pass, because a removed part refuses to be called.
def leave_out_other_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Replace every part beside the text model by a ``LeftOut``; return their paths.

    The text model is the outermost module around the decoder layers that has the text
    configuration. Embeddings and the output head are not moved.
    """
    text_path = _text_model_path(model)
    kept = (model.get_input_embeddings(), model.get_output_embeddings())
    left_out = []
    for holder_path in _holders(text_path):
        holder = model.get_submodule(holder_path)
        for name, part in list(holder.named_children()):
            path = f"{holder_path}.{name}" if holder_path else name
            is_text = f"{text_path}.".startswith(f"{path}.") or _holds_any(part, kept)
            is_text |= embeds_own_tokens(part)
            if not is_text and next(part.parameters(), None) is not None:
                setattr(holder, name, LeftOut(path, part))
                left_out.append(path)
    return tuple(left_out)


def without_other_parts(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class that makes models without these parts, so that their weights are not read."""

    class TextOnly(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
            super().__init__(config, *inputs, **kwargs)
            leave_out_other_parts(self)

    # The library finds the renaming of names on disk by the name of the class and its module.
    TextOnly.__name__ = model_class.__name__
    TextOnly.__qualname__ = model_class.__qualname__
    TextOnly.__module__ = model_class.__module__
    return TextOnly


def _text_model_path(model: PreTrainedModel) -> str:
    path = find_layers(model).rpartition(".")[0]
    config_class = type(model.config.get_text_config())
    for holder_path in (*_holders(path), path):
        holder = model.get_submodule(holder_path)
        if isinstance(holder, PreTrainedModel) and type(holder.config) is config_class:
            return holder_path
    return path


def _holders(path: str) -> list[str]:
    """The paths of all modules that contain the module at ``path``, from the model ("") on."""
    names = path.split(".") if path else []
    return [".".join(names[:end]) for end in range(len(names))]


def _holds_any(part: nn.Module, modules: tuple[nn.Module | None, ...]) -> bool:
    return any(one is module for one in part.modules() for module in modules)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model as it will be served, on the meta device."""

    model: PreTrainedModel
    model_class: type[PreTrainedModel]  # loads its weights
    transposed: frozenset[str]  # paths of linears with weights [in, out] on disk


class _WithoutInitialValues(TorchFunctionMode):
    """Skips initial values of modules on the meta device, where there are no values."""

    def __init__(self, *, ranges_on_cpu: bool) -> None:
        """``ranges_on_cpu``: also skips what modules compute from them, as rotary embeddings do."""
        super().__init__()
        self._ranges_on_cpu = ranges_on_cpu

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            tensor: torch.Tensor = args[0] if args else named["tensor"]
            if tensor.is_meta:
                return tensor
        elif func is torch.arange and self._ranges_on_cpu:
            device = named.get("device") or torch.get_default_device()
            if torch.device(device).type == "meta":
                named["device"] = "cpu"
        return func(*args, **named)


def without_initial_values(build: Callable[[], _T]) -> _T:
    """Return the result of ``build``; modules on the meta device get no initial values.

    torch implements random values and arithmetic on that device in Python, which imports sympy:
    35 MiB and a quarter of a second. So modules compute with ranges on the CPU. Those that fail,
    because they combine them with tensors of the meta device, are built again without this.
    """
    try:
        with _WithoutInitialValues(ranges_on_cpu=True):
            return build()
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
    with _WithoutInitialValues(ranges_on_cpu=False):
        return build()


def build_skeleton(source: ModelSource, config: Any, attention: str) -> Skeleton:
    """Build the model from its configuration alone; no weights are read.

    ``attention``: the name of a registered attention function. Raises ``ModelError`` naming the
    architecture and the reason.
    """
    _check_layer_types(config)
    auto_class = _auto_class(source, config)
    config = _for_text(config)
    try:
        # In bfloat16, because some products of experts support no other type on the meta device.
        with torch.device("meta"):
            model: PreTrainedModel = without_initial_values(
                lambda: auto_class.from_config(
                    copy.deepcopy(config),
                    attn_implementation=attention,
                    dtype=torch.bfloat16,
                    trust_remote_code=source.trust_remote_code,
                )
            ).to("meta")
    except Exception as error:  # any error of the model's code
        reason = f"{type(error).__name__}: {error}"
        if attention in reason:  # it has a fixed table of attention classes
            reason = "its attention does not use transformers' attention interface"
        raise ModelError(f"cannot build {source.path!r} ({describe(config)}): {reason}") from error
    model_class = type(model)
    if leave_out_other_parts(model):
        model_class = without_other_parts(model_class)
    return Skeleton(model.eval(), model_class, linears_for_conv1d(model))


def target_map_of(source: ModelSource) -> TargetMap:
    """The targets of a model, without its weights; see ``target_map_and_code_of``."""
    return target_map_and_code_of(source)[0]


def target_map_and_code_of(source: ModelSource) -> tuple[TargetMap, tuple[Path, ...]]:
    """The targets of a model, without its weights, and the files of its classes.

    Raises ``ModelError`` for everything that a start refuses and that needs no weights to detect.
    """
    config = load_config(source)
    warn_of_adapter(source)
    read_stored_quantization(config)
    hook = PagedAttentionHook(StepContext())
    try:
        model = build_skeleton(source, config, hook.name).model
        return _as_called(build_target_map(model), model, hook), code_files(model)
    finally:
        hook.close()


def _as_called(target_map: TargetMap, model: PreTrainedModel, hook: PagedAttentionHook) -> TargetMap:
    """Run the model without weights; only modules that it calls are targets."""
    paths = [target.path for target in target_map.targets]

    def run(with_padding_mask: bool) -> None:
        with torch.device("meta"):
            record_attention(model, hook, with_padding_mask=with_padding_mask)

    for with_padding_mask in (False, True):
        try:
            calls = record_calls(model, paths, partial(run, with_padding_mask))
        except ModelError as error:
            if not _needs_values(error.__cause__):
                raise
        else:
            return with_calls(target_map, calls)
    return target_map


def _needs_values(error: BaseException | None) -> bool:
    """Whether a pass failed because it reads values of tensors, which have none here."""
    is_of_values = isinstance(error, RuntimeError) and "meta" in str(error)
    return is_of_values or isinstance(error, NotImplementedError)


def _auto_class(source: ModelSource, config: Any) -> Any:
    """The auto class: for a model of text and images, or for a causal language model.

    The checkpoints of a type that is both are those of text and images, with names that adapters
    have.
    """
    auto_map = getattr(config, "auto_map", None) or {}
    is_remote = source.trust_remote_code and AutoModelForCausalLM.__name__ in auto_map
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not is_remote:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or is_remote:
        return AutoModelForCausalLM
    raise ModelError(
        f"cannot build {source.path!r} ({describe(config)}): transformers has neither a causal "
        "language model nor a model of images and text for this type"
    )


def _for_text(config: Any) -> Any:
    """A copy without attention between the tokens of an image, which masks of text read too."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, _BIDIRECTIONAL, None) == "vision":
        setattr(text, _BIDIRECTIONAL, None)
    return config


def _check_layer_types(config: Any) -> None:
    """Refuse layers with state other than keys and values in the pool."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise ModelError(
            f"{describe(config)} has layers of type {', '.join(sorted(kinds))}; corun serves only "
            "full, sliding and chunked attention, as other layers keep state outside the KV pool"
        )


def linears_for_conv1d(model: nn.Module) -> frozenset[str]:
    """Replace every ``Conv1D`` of ``model`` by an equivalent ``nn.Linear``.

    The weight [in_features, out_features] is not copied, but viewed transposed. Returns the paths
    of the replaced modules.
    """
    paths = [path for path, module in model.named_modules() if type(module) is Conv1D]
    for path in paths:
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, name, _linear(model.get_submodule(path)))
    return frozenset(paths)


def _linear(conv: nn.Module) -> nn.Linear:
    weight, bias = conv.get_parameter("weight"), conv.get_parameter("bias")
    in_features, out_features = weight.shape
    linear = nn.Linear(in_features, out_features, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.t(), requires_grad=weight.requires_grad)
    linear.bias = nn.Parameter(bias, requires_grad=bias.requires_grad)
    return linear
