"""The parts of an engine that follow grammars of structured output."""

from typing import TYPE_CHECKING, Any

from ...grammar.tokenizer import TokenTree
from ..tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from ....gpu.model.generation import GenerationDefaults


def make_token_tree(
    tokenizer: ModelTokenizer, config: Any, defaults: "GenerationDefaults"
) -> TokenTree:
    """Return the tree of a model's tokens, not begun yet. ``config``: of the text model."""
    num_own = max(tokenizer.tokens.ids.values(), default=-1) + 1
    ends = [one for one in defaults.eos_token_ids if one < num_own]
    num_ids = max(int(config.vocab_size), num_own)
    return TokenTree(tokenizer.backend, num_ids=num_ids, eos_token_ids=ends)
