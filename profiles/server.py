"""A server of another engine type in its profile, as observed from outside. Pure."""

from dataclasses import dataclass

_KV_SHARE = 0.1  # by which KV memory may differ between two starts on one machine


@dataclass(frozen=True, slots=True)
class SeenServer:
    """Identity and configuration of a server, as far as its answers show them."""

    version: str
    base: str  # the source of its base model, as it reports it
    max_model_len: int
    block_size: int
    kv_tokens: int
    kv_dtype: str

    def unlike(self, other: "SeenServer") -> str | None:
        """Why figures of this server do not apply to ``other``, which runs now; None = they do.

        KV memory differs a little from start to start, and a lot with another accelerator or
        another share of it.
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
    """A measured server, with properties that its answers do not show."""

    kind: str  # the type of its API
    seen: SeenServer
    base_fingerprint: str  # as an engine computes it
    # Limits of a step and of concurrent requests that the server was started with, as the options
    # of the measurement say.
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A server's base model, by its configuration."""

    fingerprint: str  # see ``MeasuredServer``
    dtype: str
    num_layers: int
    vocab_size: int
    kv_bytes_per_token: int  # over all layers
    targets: tuple[tuple[str, int, int], ...]  # module, input width, output columns

    @property
    def adapter_bytes_per_rank(self) -> int:
        """Bytes per rank of an adapter on all targets, on the device."""
        item_bytes = 4 if self.dtype == "float32" else 2
        return item_bytes * sum(width + columns for _, width, columns in self.targets)
