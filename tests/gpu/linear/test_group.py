"""Linears of one input: computed once, in any order of calls, and nothing is stored afterwards."""

import weakref
from collections.abc import Hashable, Sequence

import pytest
import torch
from corun.gpu.forward.batch import StepContext
from corun.gpu.linear.base import LinearBackend, MakeLinear
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.onednn import OnednnLinear
from corun.gpu.linear.plain import FusedPlain, PlainLinear
from corun.gpu.linear.wrapper import InputGroup, wrap_linears
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from support.lora import make_batch
from torch import nn

WIDTHS = (70, 16, 64)


class Counting:
    """A backend that counts its products."""

    name = "counting"
    bias = None

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.num_calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x @ self.weight.t()


def make_group(backends: Sequence[LinearBackend]) -> InputGroup:
    group = InputGroup(StepContext(), "qkv")
    assert [group.join(backend, None) for backend in backends] == list(range(len(backends)))
    group.fuse()
    return group


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_product_per_member_and_pass_in_any_order(order: tuple[int, ...]) -> None:
    backends = [Counting(torch.randn(width, 8)) for width in WIDTHS]
    group = make_group(backends)
    for num_passes in (1, 2):
        x = torch.randn(1, 5, 8)
        for member in order:
            assert torch.equal(group.product(member, x), x @ backends[member].weight.t())
        assert [backend.num_calls for backend in backends] == [num_passes] * 3


def test_a_pass_that_ended_early_leaves_nothing_to_the_next() -> None:
    backends = [Counting(torch.randn(width, 8)) for width in WIDTHS]
    group = make_group(backends)
    group.product(0, torch.randn(1, 5, 8))
    x = torch.randn(1, 5, 8)
    assert torch.equal(group.product(2, x), x @ backends[2].weight.t())
    x.add_(1)  # the same tensor in another pass
    assert torch.equal(group.product(2, x), x @ backends[2].weight.t())
    assert torch.equal(group.product(1, x), x @ backends[1].weight.t())


def test_the_input_and_the_results_are_released() -> None:
    group = make_group([Counting(torch.randn(width, 8)) for width in WIDTHS])
    x = torch.randn(1, 5, 8)
    results = [group.product(member, x) for member in range(3)]
    alive = [weakref.ref(tensor) for tensor in (x, *results)]
    del x, results
    assert [reference() for reference in alive] == [None] * 4


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(PlainLinear, torch.bfloat16), (OnednnLinear, torch.float32), (NumbaLinear, torch.bfloat16)],
)
@pytest.mark.parametrize("tokens", [1, 6, 130])
def test_together_is_what_each_computes_alone(make: MakeLinear, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    backends = [
        make(
            torch.randn(width, 37, generator=generator).to(dtype),
            torch.randn(width, generator=generator).to(dtype) if width == 16 else None,
        )
        for width in WIDTHS
    ]
    x = torch.randn(1, tokens, 37, generator=generator).to(dtype)
    group = make_group(backends)
    for member, backend in enumerate(backends):
        result = group.product(member, x)
        assert result.shape == (1, tokens, WIDTHS[member])
        assert result.is_contiguous()
        assert torch.equal(result, backend(x))


@pytest.mark.parametrize("with_bias", [True, False])
def test_plain_weights_become_parts_of_one(with_bias: bool) -> None:
    biases = [None, torch.randn(16) if with_bias else None, None]
    backends = [PlainLinear(torch.randn(w, 37), b) for w, b in zip(WIDTHS, biases, strict=True)]
    x = torch.randn(1, 5, 37)
    alone = [backend(x) for backend in backends]
    together = FusedPlain(backends)(x)
    assert len({y.untyped_storage().data_ptr() for y in together}) == 1
    assert len({backend.weight.untyped_storage().data_ptr() for backend in backends}) == 1
    for backend, before, y in zip(backends, alone, together, strict=True):
        torch.testing.assert_close(y, before)
        torch.testing.assert_close(backend(x), before)  # it also serves alone


class Strides:
    """A pass of deltas that looks at the strides of tokens."""

    is_repeatable, has_factors = True, False

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        pass

    def add(
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        self.seen |= {y.stride(0) for y in ys}


def test_deltas_of_one_token_get_the_strides_of_many() -> None:
    context = StepContext()
    context.deltas = strides = Strides()
    group = InputGroup(context, "qkv")
    for index, width in enumerate(WIDTHS):
        group.join(PlainLinear(torch.empty(width, 8, device="meta"), None), index)
    group.fuse()
    for num_tokens in (1, 2):
        group.product(0, torch.empty(1, num_tokens, 8, device="meta"))
    assert strides.seen == {sum(WIDTHS)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 8)
        self.k = nn.Linear(6, 4, bias=False)
        self.o = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.k(x)
        result: torch.Tensor = self.o(torch.cat((self.q(x), k), dim=-1).relu())
        return result


@torch.inference_mode()
def test_a_model_with_groups_computes_what_it_does_without() -> None:
    torch.manual_seed(0)
    model, grouped = Attention().eval(), Attention().eval()
    grouped.load_state_dict(model.state_dict())
    table = LoraTable(3, 2, "cpu")
    lora = TorchLora(table, dtype=torch.float32)
    rows = [
        table.add(
            DeviceAdapter(
                {
                    target: lora.pack(torch.randn(3, width_in), torch.randn(width, 3), 2.0)
                    for target, (width, width_in) in targets.items()
                }
            )
        )
        for targets in ({0: (8, 6), 1: (4, 6), 2: (6, 12)}, {1: (4, 6)})  # one lacks q and o
    ]
    target_of = {"q": 0, "k": 1, "o": 2}
    context = StepContext()
    wrap_linears(model, context, PlainLinear, target_of, {})
    wrap_linears(grouped, context, PlainLinear, target_of, {"q": 0, "k": 0, "o": 1})
    x = torch.randn(1, 9, 6)
    base = model(x)
    assert torch.equal(grouped(x), base)
    context.deltas = ResidentDeltas(lora, make_batch([(0, 2, 0), (3, 7, 1)], table, rows))
    mixed = model(x)
    assert not torch.equal(mixed, base)
    assert torch.equal(grouped(x), mixed)
    context.deltas = ResidentDeltas(lora, make_batch([(0, 9, 1)], table, rows))
    assert torch.equal(grouped(x), model(x))
