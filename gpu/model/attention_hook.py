"""corun's side of transformers' ``AttentionInterface``: one registered function per model.

The function refuses every argument that would change attention in an unknown way: an ignored
argument would give a wrong answer without an error.

transformers' own attention uses the mask, and many models define a window or a chunk only in their
mask. While a pass is recorded, a mask function is registered beside the attention function: it
records what each mask shows and returns a tensor that identifies the mask to the layers using it.
When requests are served, no mask is made.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...runtime.errors import ModelError
from ..attention.base import AttentionBackend, AttentionParams
from ..forward.batch import StepContext
from ..fused.triton_backend import Rotated
from .kv_pool import KvPool, LayerKvShape

_IDS = itertools.count()

# Arguments that do not change the result of causal attention over the pool: positions are already
# in the keys, the pool is the cache, and the others request outputs that are not used here.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "past_key_values",
        "past_key_value",
        "cache",
        "dropout",
        "layer_idx",
        "num_items_in_batch",
    }
)


# Of batch, head, query and key, which broadcast; True where the query sees the key.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_NUM_PERIODS = 4  # periods of a window or chunk with evaluated edges
_MAX_POSITION_BITS = 24


# No mask is built: the function is evaluated at indices on both sides of every edge, so the length
# of a window or a chunk costs nothing.
@dataclass(frozen=True, slots=True)
class Sight:
    """Which earlier tokens a causal layer sees."""

    window: int | None = None  # this many last positions, including its own
    chunk: int | None = None  # positions from the last multiple of this number on


class _NotOfPositionsError(ModelError):
    """The mask also depends on tensors of a pass."""


def read_mask(mask: MaskFunction, local_size: int | None, device: str = "cpu") -> Sight:
    """Find the ``Sight`` that ``mask`` describes.

    ``local_size``: the size of the mask's window or chunk according to transformers, or None.
    ``device``: the model's. On "meta", where tensors have no values, a mask that depends on tensors
    is treated as a chunk of that size.

    Raises ``ModelError`` if the mask is neither causal, nor a causal window or chunk of that size.
    """
    with torch.device("cpu" if device == "meta" else device):
        try:
            return _read_mask(mask, local_size)
        except _NotOfPositionsError:
            if device != "meta" or local_size is None:
                raise
            return Sight(chunk=local_size)


def _read_mask(mask: MaskFunction, local_size: int | None) -> Sight:
    query, key = (edges[:, None] for edges in (_edges(local_size), _edges(local_size)))
    key = key.T
    zero = torch.zeros((), dtype=torch.int64)
    try:
        seen = mask(zero, zero, query, key).broadcast_to(query.shape[0], key.shape[1])
    except (IndexError, RuntimeError, ValueError) as error:
        raise _NotOfPositionsError(f"its attention mask is not a function of positions ({error})") from error
    causal = key <= query
    if torch.equal(seen, causal):
        return Sight()
    if local_size is not None:
        if torch.equal(seen, causal & (key > query - local_size)):
            return Sight(window=local_size)
        if torch.equal(seen, causal & (key // local_size == query // local_size)):
            return Sight(chunk=local_size)
    raise ModelError("its attention mask is neither causal nor a causal window or chunk")


def _edges(local_size: int | None) -> torch.Tensor:
    """Positions next to powers of two and to multiples of ``local_size``: int64 [positions]."""
    centres = [2**bits for bits in range(_MAX_POSITION_BITS)]
    if local_size is not None:
        centres += [local_size * i for i in range(_NUM_PERIODS)]
    near = {centre + offset for centre in centres for offset in (-1, 0, 1)}
    return torch.tensor(sorted(position for position in near if position >= 0))


@dataclass(slots=True)
class AttentionRecord:
    """The layers' calls of attention during one recorded pass."""

    layer_indices: list[int] = field(default_factory=list)  # in the order of the calls
    shapes: dict[int, LayerKvShape] = field(default_factory=dict)
    sights: dict[int, Sight] = field(default_factory=dict)
    # Masks of the pass by the identity of their memory, which lives as long as the record.
    masks: dict[int, tuple[torch.UntypedStorage, Sight]] = field(default_factory=dict)

    @property
    def max_chunk_len(self) -> int | None:
        """Tokens up to which chunked layers see all earlier tokens; None = any number."""
        chunks = [sight.chunk for sight in self.sights.values() if sight.chunk is not None]
        return min(chunks, default=None)


class PagedAttentionHook:
    """Serves one model's attention calls from its KV pool.

    While ``recording`` it computes plain causal attention over the packed tokens instead, so that
    the shapes of keys and values are known before a pool exists.
    """

    def __init__(self, context: StepContext) -> None:
        self.name = f"corun-{next(_IDS)}"
        self._context = context
        self._backend: AttentionBackend | None = None
        self._pool: KvPool | None = None
        self._record: AttentionRecord | None = None
        self._windows: dict[int, int | None] = {}  # by layer, if its mask is known
        AttentionInterface.register(self.name, self._attend)

    def attach(self, backend: AttentionBackend, pool: KvPool) -> None:
        """Serve from ``pool`` by ``backend`` from now on."""
        self._backend = backend
        self._pool = pool

    def close(self) -> None:
        """Remove the function from transformers' table; the model cannot run afterwards."""
        _unregister(AttentionInterface, self.name)
        self._pool = None

    @contextmanager
    def recording(self) -> Iterator[AttentionRecord]:
        """Record the calls of the passes inside the ``with`` block."""
        self._record = AttentionRecord()
        AttentionMaskInterface.register(self.name, self._make_mask)
        try:
            yield self._record
        finally:
            self._record = None
            _unregister(AttentionMaskInterface, self.name)

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Called by every attention layer; query is [1, heads, tokens, dim]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        query, key, value = map(_by_token, (query, key, value))
        if self._record is not None:
            sight = self._sight(module, attention_mask)
            if sight is not None:
                self._windows[layer] = sight.window
            params = self._params(module, layer, query, kwargs)
            self._record_layer(layer, key, value, sight or Sight(params.sliding_window))
            return _plain_causal(query, key, value, params)[None], None
        self._context.progress.begin_layer(layer)
        metadata = self._context.attention
        assert self._backend is not None and self._pool is not None and metadata is not None
        if attention_mask is not None:
            raise _own_mask(module)
        params = self._params(module, layer, query, kwargs)
        key_blocks, value_blocks = self._pool.layer(layer)
        out = self._backend.forward(query, key, value, key_blocks, value_blocks, metadata, params)
        return out[None], None

    def _params(
        self, module: nn.Module, layer: int, query: torch.Tensor, kwargs: dict[str, Any]
    ) -> AttentionParams:
        """Translate a call; the layer's mask takes precedence over the call's arguments."""
        params = _read_params(module, query, kwargs)
        window = self._windows.get(layer, params.sliding_window)
        return params if window == params.sliding_window else replace(params, sliding_window=window)

    def _make_mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction,
        local_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Called by transformers for each kind of mask; returns [batch, 1, queries, keys]."""
        record = self._record
        assert record is not None
        mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
        memory = mask.untyped_storage()  # has no address on the meta device
        sight = read_mask(mask_function, local_size, str(mask.device))
        record.masks[id(memory)] = (memory, sight)
        return mask

    def _sight(self, module: nn.Module, mask: torch.Tensor | None) -> Sight | None:
        """The sight of ``mask``; None without a mask. Raises ``ModelError`` if it is unknown."""
        if mask is None:
            return None
        assert self._record is not None
        known = self._record.masks.get(id(mask.untyped_storage()))
        if known is None:
            raise _own_mask(module)
        return known[1]

    def _record_layer(self, layer: int, key: torch.Tensor, value: torch.Tensor, sight: Sight) -> None:
        record = self._record
        assert record is not None
        record.layer_indices.append(layer)
        record.shapes[layer] = LayerKvShape(key.shape[1], key.shape[2], value.shape[2])
        record.sights[layer] = sight


def _by_token(part: torch.Tensor | Rotated) -> torch.Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim]; a rotation waits for the back end."""
    if isinstance(part, Rotated):
        return cast(torch.Tensor, part.by_token())
    return part[0].transpose(0, 1)


def _own_mask(module: nn.Module) -> ModelError:
    return ModelError(f"{type(module).__name__} brings its own attention mask")


def _read_params(module: nn.Module, query: torch.Tensor, kwargs: dict[str, Any]) -> AttentionParams:
    """Translate the call's arguments. Raises ``ModelError`` for an unknown one."""
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} uses attention that is not causal")
    scaling, window, softcap, sinks = None, None, None, None
    for name, argument in kwargs.items():
        if name == "scaling":
            scaling = argument
        elif name == "sliding_window":
            window = argument
        elif name == "softcap":
            softcap = argument
        elif name == "s_aux":
            sinks = argument
        elif name != "is_causal" and name not in _WITHOUT_EFFECT and argument is not None:
            raise ModelError(
                f"{type(module).__name__} passes the attention argument {name!r}, which corun does "
                "not know; serving it would answer wrongly"
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return AttentionParams(float(scaling), window, softcap, sinks)


def _plain_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Causal attention over one short packed sequence: [tokens, heads, dim], float32 inside."""
    groups = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(groups, dim=1)
    values = value.float().repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype).contiguous()


def _unregister(interface: Any, name: str) -> None:
    """Remove a registered function; the tables have no public method for it."""
    table: dict[str, Callable[..., Any]] = interface._global_mapping
    table.pop(name, None)
