"""Finds the linear modules of a transformers decoder that adapters may change.

Decides which modules are targets, and why others are not. Independent of adapters and kernels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from ...runtime.adapters.target_map import (
    EXPERTS_REASON,
    Target,
    TargetMap,
    UnusedModule,
    Vocabulary,
)
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

    Every ``nn.Linear`` inside the decoder layers is one, including fused projections, unless it is
    an expert or a router. Each is its own input group until ``with_input_groups`` states which ones
    share an input. Omitted parts of the model, and modules that layers may lack, are unused.
    Raises ``ModelError`` if the model has no decoder layers.
    """
    layers_path = find_layers(model)
    head = model.get_output_embeddings()
    targets: list[Target] = []
    refused: dict[str, str] = {}
    next_group: dict[int, int] = {}
    for path, module in model.named_modules():
        reason = _refusal(model, path, module, layers_path, is_head=module is head)
        if reason is not None:
            refused[path] = reason
        elif isinstance(module, nn.Linear):
            layer = _layer_index(path, layers_path)
            group = next_group.setdefault(layer, 0)
            next_group[layer] = group + 1
            targets.append(_target(len(targets), path, layer, group, module))
    unused = (*left_out_parts(model), *_of_shared_kv(model, layers_path))
    return TargetMap(tuple(targets), refused, unused, _vocabularies(model))


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


def record_input_groups(
    model: nn.Module, paths: Sequence[str], forward: Callable[[], object]
) -> dict[str, int]:
    """Run ``forward`` (a tiny pass through ``model``) and group ``paths`` by their input tensor.

    Returns a number per path; paths of modules that are not called are missing.
    """
    records: list[tuple[str, int]] = []
    alive: list[torch.Tensor] = []  # an identity is unique only while the tensor lives

    def hook_for(path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            alive.append(inputs[0])
            records.append((path, id(inputs[0])))

        return hook

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook_for(path)) for path in paths
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return group_by_input(records)


def with_input_groups(target_map: TargetMap, groups: Mapping[str, int]) -> TargetMap:
    """Return the map with ``groups`` (path -> number) as input groups.

    ``groups`` numbers them in the order in which the model calls them, and so does the result,
    within each layer: CPU workers compute their jobs in this order. A target that is missing in
    ``groups`` was not called, so an adapter on it would have no effect: it becomes refused.
    """
    called = [target for target in target_map.targets if target.path in groups]
    of_layer: dict[int, set[int]] = {}
    for target in called:
        of_layer.setdefault(target.layer, set()).add(groups[target.path])
    numbers = {
        (layer, group): number
        for layer, found in of_layer.items()
        for number, group in enumerate(sorted(found))
    }
    targets = tuple(
        replace(target, index=index, input_group=numbers[target.layer, groups[target.path]])
        for index, target in enumerate(called)
    )
    never = {
        target.path: "the model never calls this module"
        for target in target_map.targets
        if target.path not in groups
    }
    return replace(target_map, targets=targets, refused={**target_map.refused, **never})


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
            shapes = {
                name: tuple(one.shape) for name, one in module.named_parameters(recurse=False)
            }
            first = path_of.setdefault(id(getattr(module, "weight", module)), path)
            found[path] = Vocabulary(path, shapes, None if first == path else first)
    return found


def _matrix_shape(weight: nn.Parameter) -> tuple[int, ...]:
    """Outputs and inputs of a linear, or of a convolution as LoRA sees it."""
    return (weight.shape[0], weight[0].numel()) if weight.ndim >= 2 else ()


def _target(index: int, path: str, layer: int, group: int, module: nn.Linear) -> Target:
    return Target(
        index=index,
        path=path,
        layer=layer,
        input_group=group,
        in_features=module.in_features,
        out_features=module.out_features,
        physical_path=path,
    )


def _refusal(
    model: nn.Module, path: str, module: nn.Module, layers_path: str, *, is_head: bool
) -> str | None:
    """Why a module with matrices is not a target; None for targets and all other modules."""
    reason = None
    if is_head:
        reason = "the output head (lm_head) is not served as a target"
    elif isinstance(module, nn.Embedding):
        reason = "embeddings are not served as targets"
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        reason = f"convolution targets ({type(module).__name__}) are not served yet"
    elif not any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)):
        reason = None
    elif not path.startswith(f"{layers_path}."):
        reason = "it is outside of the decoder layers"
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


def _layer_index(path: str, layers_path: str) -> int:
    return int(path.removeprefix(f"{layers_path}.").partition(".")[0])


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Module lists that are in no other list."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield child_path, child
        else:
            yield from _outermost_lists(child, child_path)
