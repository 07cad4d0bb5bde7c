"""Shapes of base models, with the memory and arithmetic that follow from them. Pure."""

from dataclasses import dataclass

_VALUE_BYTES = 2  # of weights, adapters, keys and values
_NUM_WORDS = 32_000  # of the vocabulary


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A model of the Llama family, as in its config.json."""

    num_layers: int
    hidden: int
    kv_width: int  # of keys, and of values: heads times their size
    intermediate: int

    @property
    def layer_values(self) -> int:
        """Weights of a layer's linears; each token is multiplied with each of them once."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def qkv_share(self) -> float:
        """The share of q, k and v in a layer's products."""
        return self.hidden * (self.hidden + 2 * self.kv_width) / self.layer_values

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Weights of a layer's linears by input group: q, k and v; o; gate and up; down."""
        values = (self.hidden + 2 * self.kv_width, self.hidden, 2 * self.intermediate, self.intermediate)
        return tuple(_VALUE_BYTES * self.hidden * one for one in values)

    @property
    def weight_bytes(self) -> int:
        words = 2 * _NUM_WORDS * self.hidden
        return _VALUE_BYTES * (self.num_layers * self.layer_values + words)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values over all layers."""
        return _VALUE_BYTES * 2 * self.num_layers * self.kv_width

    @property
    def qkv_bytes_per_rank(self) -> int:
        """Bytes per rank of an adapter on q, k and v, over all layers."""
        return _VALUE_BYTES * self.num_layers * (4 * self.hidden + 2 * self.kv_width)

    @property
    def attention_bytes_per_rank(self) -> int:
        """Bytes per rank of an adapter on q, k, v and o, over all layers."""
        return self.qkv_bytes_per_rank + _VALUE_BYTES * self.num_layers * 2 * self.hidden


LLAMA_7B = LlamaShape(32, 4096, 4096, 11_008)
LLAMA_8B = LlamaShape(32, 4096, 1024, 14_336)
LLAMA_13B = LlamaShape(40, 5120, 5120, 13_824)
LLAMA_30B = LlamaShape(60, 6656, 6656, 17_920)
LLAMA_70B = LlamaShape(80, 8192, 1024, 28_672)
