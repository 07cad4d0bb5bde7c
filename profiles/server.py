"""A server of another kind, as its profile is of it: what can be told of it from outside. Pure."""

from dataclasses import dataclass

_KV_SHARE = 0.1  # by which the room for KV may differ between two starts on one machine


@dataclass(frozen=True, slots=True)
class SeenServer:
    """What it is, and how it is set up, as far as its answers show that."""

    version: str
    base: str  # where it has its base model from, as it says
    max_model_len: int
    block_size: int
    kv_tokens: int
    kv_dtype: str

    def unlike(self, other: "SeenServer") -> str | None:
        """Why figures of this one are none of ``other``, which is looked at now; None = they are.

        How much room there is for KV differs a little from start to start, and a lot where the
        accelerator, or the share of it, is another one.
        """
        for what, mine, theirs in (
            ("base model", self.base, other.base),
            ("KV blocks of tokens", self.block_size, other.block_size),
            ("KV as", self.kv_dtype, other.kv_dtype),
        ):
            if mine != theirs:
                return f"{what} {mine} there, {theirs} here"
        if abs(self.kv_tokens - other.kv_tokens) > _KV_SHARE * self.kv_tokens:
            return f"room for {self.kv_tokens} tokens of KV there, for {other.kv_tokens} here"
        return None


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """One that was measured, with what it does not show."""

    kind: str  # of its API
    seen: SeenServer
    base_fingerprint: str  # as an engine would name its base
    # Of a step, and of requests at once: what it was started with, as whoever measured it said.
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A server's base model, as its configuration has it."""

    fingerprint: str  # see ``MeasuredServer``
    dtype: str
    num_layers: int
    vocab_size: int
    kv_bytes_per_token: int  # over all layers
    targets: tuple[tuple[str, int, int], ...]  # module, input width, output columns

    @property
    def adapter_bytes_per_rank(self) -> int:
        """Of an adapter on all targets, on the device."""
        item_bytes = 4 if self.dtype == "float32" else 2
        return item_bytes * sum(width + columns for _, width, columns in self.targets)
