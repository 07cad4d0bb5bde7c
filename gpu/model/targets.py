"""Finds the linear modules of a transformers decoder that adapters may change.

Decides which modules are targets, and why others are not. Independent of adapters and kernels.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from ...runtime.adapters.target_map import EXPERTS_REASON, Target, TargetMap, UnusedModule, Vocabulary
from ...runtime.errors import ModelError

_ROUTER_NAMES = frozenset({"gate", "router"})
_NO_TEXT_REASON = "it is not used for text"
_SHARED_KV = "is_kv_shared_layer"  # of attention modules, in models with layers that share KV
_SHARED_KV_REASON = "the layer shares the keys and values of another one"


class LeftOut(nn.Module):
    """Replaces a part that is not used for text, such as a vision tower."""

    def __init__(self, path: str, part: nn.Module) -> None:
        """``part``: the module at ``path`` of the model."""
        super().__init__()
        self.unused = _unused_module(path, part, _NO_TEXT_REASON)

    def forward(self, *_inputs: object, **_arguments: object) -> NoReturn:
        """Raise ``ModelError``: the model uses for text a part that was not loaded."""
        raise ModelError(f"the model runs {self.unused.path} for text, but this part is not loaded")


def build_target_map(model: PreTrainedModel) -> TargetMap:
    """List the targets of a causal language model of transformers, in the order of its modules.

    Every ``nn.Linear`` is one, including fused projections and the output head, unless it is an
    expert or a router, and so is the embedding of tokens. Each is its own input group of its layer,
    or of the first one, until ``with_calls`` states which ones share an input, and which of those
    outside of the layers are called behind them. Omitted parts of the model, and modules that
    layers may lack, are unused.
    Raises ``ModelError`` if the model has no decoder layers.
    """
    layers_path = find_layers(model)
    head = model.get_output_embeddings()
    targets: list[Target] = []
    refused: dict[str, str] = {}
    next_group: dict[int, int] = {}
    text_paths = (
        layers_path.removesuffix(layers_path.rpartition(".")[2]),  # with a dot, or ""
        *(f"{path}." for path, module in model.named_modules() if embeds_own_tokens(module)),
    )
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    for path, module in model.named_modules():
        reason = _refusal(model, path, module)
        is_linear = reason is None and isinstance(module, nn.Linear)
        if is_linear and module is not head and not path.startswith(text_paths):
            reason = "it is outside of the decoder, where not all tokens are computed"
        elif is_linear and module is head and not keeps_logits:
            reason = "the model runs its output head for all tokens, not only where logits are used"
        if reason is not None:
            refused[path] = reason
        elif isinstance(module, nn.Linear | nn.Embedding):
            layer = _layer_index(path, layers_path)
            group = next_group.setdefault(layer or 0, 0)
            next_group[layer or 0] = group + 1
            targets.append(
                Target(
                    len(targets),
                    path,
                    layer or 0,
                    group,
                    *_features(module),
                    physical_path=path,
                    is_inside=layer is not None,
                    is_head=module is head,
                    is_embedding=isinstance(module, nn.Embedding),
                )
            )
    unused = (*left_out_parts(model), *_of_shared_kv(model, layers_path))
    return TargetMap(tuple(targets), refused, unused, _vocabularies(model))


def embeds_own_tokens(part: nn.Module) -> bool:
    """Whether a part beside the text model embeds a range of token ids.

    The model calls it for all tokens, and uses its results for those ids.
    """
    return hasattr(part, "vocab_offset")


def find_layers(model: PreTrainedModel) -> str:
    """Return the path of the list of decoder layers, e.g. "model.layers".

    In a model with several towers it is the text decoder's. Raises ``ModelError`` if none is found.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        path
        for path, module in _outermost_lists(model, "")
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    text = [path for path in found if "language_model" in path.split(".")]
    if len(text or found) != 1:
        raise ModelError(
            f"cannot tell which module of {type(model).__name__} is the list of its {num_layers} "
            f"decoder layers; candidates: {', '.join(found) or 'none'}"
        )
    return (text or found)[0]


def group_by_input(records: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Number the distinct inputs of modules in the order of their first use.

    Args:
        records: (module path, identity of its input) of one forward pass, in the order of calls.
            A module that was called with several inputs gets a number of its own.
    """
    inputs: dict[str, list[int]] = {}
    for path, identity in records:
        inputs.setdefault(path, []).append(identity)
    numbers: dict[int | str, int] = {}
    groups = {}
    for path, identities in inputs.items():
        key = identities[0] if len(set(identities)) == 1 else path
        groups[path] = numbers.setdefault(key, len(numbers))
    return groups


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one module in a pass."""

    group: int  # of its input, numbered in the order of first use
    num: int
    num_tokens: int  # of its last input


def record_calls(model: nn.Module, paths: Sequence[str], forward: Callable[[], object]) -> dict[str, Calls]:
    """Run ``forward`` (a tiny pass through ``model``) and record the calls of ``paths``.

    The result is in the order of first calls. Paths of modules that are not called are missing.
    """
    records: list[tuple[str, int]] = []
    num_tokens: dict[str, int] = {}
    alive: list[torch.Tensor] = []  # an identity is unique only while the tensor lives

    def hook_for(path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            alive.append(inputs[0])
            records.append((path, id(inputs[0])))
            shape = inputs[0].shape  # of token ids, or of features
            num_tokens[path] = (shape[:-1] if inputs[0].is_floating_point() else shape).numel()

        return hook

    handles = [model.get_submodule(path).register_forward_pre_hook(hook_for(path)) for path in paths]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    num_calls = Counter(path for path, _ in records)
    return {
        path: Calls(group, num_calls[path], num_tokens[path])
        for path, group in group_by_input(records).items()
    }


def with_calls(target_map: TargetMap, calls: Mapping[str, Calls]) -> TargetMap:
    """Return the map with layers and input groups as the model calls its modules.

    Input groups of a layer are numbered in the order of ``calls``: CPU workers compute their jobs
    in this order. A target that ``calls`` lacks becomes refused, as an adapter on it would have no
    effect, and so does one outside of the layers that does not run once for each token.
    """
    of_layers = [calls[one.path] for one in target_map.inside if one.path in calls]
    refused = {
        target.path: reason
        for target in target_map.targets
        if (reason := _refusal_of_calls(target, calls.get(target.path), of_layers)) is not None
    }
    first = min((one.group for one in of_layers), default=0)
    last_layer = max((target.layer for target in target_map.inside), default=0)
    called = [
        (
            target
            if target.is_inside or calls[target.path].group <= first
            else replace(target, layer=last_layer)
        )
        for target in target_map.targets
        if target.path not in refused
    ]
    numbers = _group_numbers([(target, calls[target.path].group) for target in called])
    targets = tuple(
        replace(target, index=index, input_group=numbers[target.layer, calls[target.path].group])
        for index, target in enumerate(called)
    )
    return replace(target_map, targets=targets, refused={**target_map.refused, **refused})


def _group_numbers(called: Sequence[tuple[Target, int]]) -> dict[tuple[int, int], int]:
    """The numbers of input groups, by layer and the number of their input in the order of calls.

    Those in layers count from 0 in each layer.
    """
    inside = sorted({(target.layer, group) for target, group in called if target.is_inside})
    numbers = {
        key: number for _, found in groupby(inside, key=itemgetter(0)) for number, key in enumerate(found)
    }
    outside = sorted({(target.layer, group) for target, group in called} - set(inside))
    before = [key for key in outside if inside and key < inside[0]]
    behind = outside[len(before) :]
    next_number = max(numbers.values(), default=-1) + 1
    return (
        numbers
        | {key: number for number, key in enumerate(before, start=-len(before))}
        | {key: number for number, key in enumerate(behind, start=next_number)}
    )


def _refusal_of_calls(target: Target, own: Calls | None, of_layers: Sequence[Calls]) -> str | None:
    """Why a target cannot be served as it is called (``own``), beside the calls of the layers."""
    if own is None:
        return "the model never calls this module"
    if target.is_inside:
        return None
    if own.num > 1 or all(own.num_tokens != one.num_tokens for one in of_layers):
        return "it is outside of the decoder layers, and does not run once for each token"
    groups = [one.group for one in of_layers]
    if min(groups) < own.group < max(groups):
        return "it is outside of the decoder layers, and is called between them"
    return None


def left_out_parts(model: nn.Module) -> Iterator[UnusedModule]:
    """The parts that are not used for text and were not loaded."""
    return (module.unused for module in model.modules() if isinstance(module, LeftOut))


def _of_shared_kv(model: nn.Module, layers_path: str) -> Iterator[UnusedModule]:
    """The projections missing in layers that share the keys and values of another layer.

    Older versions of the model had but did not call them, and trainers have saved LoRA for them.
    """
    peers: dict[type[nn.Module], dict[str, nn.Module]] = {}  # modules of other instances of a class
    sharing: list[tuple[str, nn.Module]] = []
    for path, module in model.get_submodule(layers_path).named_modules():
        is_shared = getattr(module, _SHARED_KV, None)
        if is_shared is True:
            sharing.append((path, module))
        elif is_shared is False:
            peers.setdefault(type(module), {}).update(module.named_children())
    for path, module in sharing:
        for name, peer in peers.get(type(module), {}).items():
            if isinstance(peer, nn.Linear) and getattr(module, name, None) is None:
                yield _unused_module(f"{layers_path}.{path}.{name}", peer, _SHARED_KV_REASON)


def _unused_module(path: str, module: nn.Module, reason: str) -> UnusedModule:
    weights = list(module.parameters())
    num_features = sum(sum(_matrix_shape(weight)) for weight in weights)
    return UnusedModule(path, reason, num_features, sum(weight.numel() for weight in weights))


def _vocabularies(model: PreTrainedModel) -> Mapping[str, Vocabulary]:
    """The embeddings of tokens and the output head, by path."""
    head = model.get_output_embeddings()
    found: dict[str, Vocabulary] = {}
    path_of: dict[int, str] = {}  # path of the first module with a weight
    for path, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding):
            shapes = {name: tuple(one.shape) for name, one in module.named_parameters(recurse=False)}
            first = path_of.setdefault(id(getattr(module, "weight", module)), path)
            found[path] = Vocabulary(path, shapes, None if first == path else first)
    return found


def _matrix_shape(weight: nn.Parameter) -> tuple[int, ...]:
    """Outputs and inputs of a linear, or of a convolution as LoRA sees it."""
    return (weight.shape[0], weight[0].numel()) if weight.ndim >= 2 else ()


def _refusal(model: PreTrainedModel, path: str, module: nn.Module) -> str | None:
    """Why a module with matrices is not a target; None for targets and all other modules."""
    reason = None
    if isinstance(module, nn.Embedding):
        if module is not model.get_input_embeddings():
            reason = "only the embedding of tokens is served as a target"
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        reason = f"convolution targets ({type(module).__name__}) are not served yet"
    elif not any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)):
        reason = None
    elif "experts" in path.split(".") or _holds_stacked_matrices(module):
        reason = EXPERTS_REASON
    elif _is_router(model, path):
        reason = "expert routers are not served as targets"
    elif not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        reason = f"{type(module).__name__} is not a plain linear module"
    return reason


def _holds_stacked_matrices(module: nn.Module) -> bool:
    return any(parameter.ndim >= 3 for parameter in module.parameters(recurse=False))


def _is_router(model: nn.Module, path: str) -> bool:
    """Whether the module has a router's name and is next to experts."""
    parent, _, name = path.rpartition(".")
    return name in _ROUTER_NAMES and hasattr(model.get_submodule(parent), "experts")


def _features(module: nn.Linear | nn.Embedding) -> tuple[int, int]:
    """The inputs and outputs of a target."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return module.in_features, module.out_features


def _layer_index(path: str, layers_path: str) -> int | None:
    """The decoder layer of a path; None outside of the layers."""
    if not path.startswith(f"{layers_path}."):
        return None
    return int(path.removeprefix(f"{layers_path}.").partition(".")[0])


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield child_path, child
        else:
            yield from _outermost_lists(child, child_path)
