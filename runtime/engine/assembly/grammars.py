"""The parts of an engine that follow grammars of structured output."""

from collections.abc import Collection

from ...grammar.tokenizer import TokenTree
from ..tokenizer import ModelTokenizer


def make_token_tree(
    tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> TokenTree:
    """Return the tree of a model's tokens, not begun yet. ``vocab_size``: of the model's logits."""
    num_own = max(tokenizer.tokens.ids.values(), default=-1) + 1
    ends = [one for one in eos_token_ids if one < num_own]
    return TokenTree(tokenizer.backend, num_ids=max(vocab_size, num_own), eos_token_ids=ends)
