"""Gated feed-forward modules of transformers' decoders: activation and product in one pass.

Activations are tables: there are only 65,536 values of 16 bits, so a table filled by the model's
own activation gives the same results, bit for bit.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ...cpu_workers.kernels import fused as kernels
from ..forward.kernel_threads import num_kernel_threads
from ..forward.launcher import current_launcher

_ACTIVATION_NAMES = ("act_fn", "activation_fn")
_THREE_LINEARS = frozenset({"gate_proj", "up_proj", "down_proj"})
_TWO_LINEARS = frozenset({"gate_up_proj", "down_proj"})
_NUM_VALUES = 2**16

# (gate, up, table) -> activation(gate) * up, as ``gated_product``.
GatedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ActivationTables:
    """Tables of activations, shared by all modules with the same activation."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> None:
        self._dtype = dtype
        self._device = device
        self._tables: list[torch.Tensor] = []

    def of(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[65536] of a 16-bit type: the activation of every value, indexed by its bits."""
        bits = torch.arange(_NUM_VALUES, dtype=torch.int32, device=self._device).to(torch.int16)
        table = activation(bits.view(self._dtype)).contiguous()
        for known in self._tables:
            if torch.equal(known.view(torch.int16), table.view(torch.int16)):
                return known
        self._tables.append(table)
        return table


def gated_product(gate: torch.Tensor, up: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up: bfloat16 [..., features], each with rows of one stride."""
    features = gate.shape[-1]
    assert gate.dtype == up.dtype == torch.bfloat16 and gate.shape == up.shape
    assert gate.stride(-1) == up.stride(-1) == 1
    gates, ups = gate.reshape(-1, features), up.reshape(-1, features)
    launcher = current_launcher()
    y = launcher.new_output(gate.shape, torch.bfloat16)
    launcher.launch(
        kernels.gated,
        gates.data_ptr(),
        gates.stride(0),
        ups.data_ptr(),
        ups.stride(0),
        table.data_ptr(),
        y.data_ptr(),
        gates.shape[0],
        features,
        num_kernel_threads(),
    )
    return y


class FusedGatedMlp:
    """Replaces the ``forward`` of a module with separate products for gate and up."""

    def __init__(self, module: nn.Module, table: torch.Tensor, product: GatedProduct) -> None:
        self._gate, self._up, self._down = (
            module.get_submodule(name).forward for name in ("gate_proj", "up_proj", "down_proj")
        )
        self._table = table
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        result: torch.Tensor = self._down(self._product(self._gate(x), self._up(x), self._table))
        return result


class GateUpGatedMlp:
    """Replaces the ``forward`` of a module with one product, gate first, then up."""

    def __init__(self, module: nn.Module, table: torch.Tensor, product: GatedProduct) -> None:
        self._gate_up, self._down = (
            module.get_submodule(name).forward for name in ("gate_up_proj", "down_proj")
        )
        self._table = table
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self._down(self._product(gate, up, self._table))
        return result


def is_gated(module: nn.Module) -> bool:
    """Whether a module has the linears of a gated feed-forward."""
    names = {name for name, _ in module.named_children()}
    return any(linears <= names for linears in (_THREE_LINEARS, _TWO_LINEARS))


def mlp_candidates(
    module: nn.Module, tables: ActivationTables, product: GatedProduct
) -> Iterator[FusedGatedMlp | GateUpGatedMlp]:
    """Possible kernels for a module that looks like a gated feed-forward; a check decides."""
    children = dict(module.named_children())
    activation = next((children[name] for name in _ACTIVATION_NAMES if name in children), None)
    if activation is None or any(True for _ in activation.parameters()):
        return
    if children.keys() >= _THREE_LINEARS:
        yield FusedGatedMlp(module, tables.of(activation), product)
    elif children.keys() >= _TWO_LINEARS:
        yield GateUpGatedMlp(module, tables.of(activation), product)
