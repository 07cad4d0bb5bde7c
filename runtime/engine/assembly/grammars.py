"""The parts of an engine that follow grammars of structured output."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...grammar.compiled import Grammars
from ...grammar.tokenizer import TokenTree
from ..tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from ....gpu.execution.sampler import Sampler
    from ....gpu.model.generation import GenerationDefaults


def make_grammars(
    tokenizer: ModelTokenizer, config: Any, defaults: "GenerationDefaults",
    notify: Callable[[], None], cpus: tuple[int, ...],
) -> Grammars:  # fmt: skip
    """Return the grammars for a model. Their tree of tokens is not begun yet.

    ``config``: transformers' configuration of the text model; ``notify``, ``cpus``: see
    ``Grammars``.
    """
    num_own = max(tokenizer.tokens.ids.values(), default=-1) + 1
    num_ids = max(int(config.vocab_size), num_own)
    # The tree needs an end token. Without one in the model, answers end with their grammars, and
    # no text has the last token.
    ends = [one for one in defaults.eos_token_ids if one < num_own] or [num_own - 1]
    tree = TokenTree(tokenizer.backend, num_ids=num_ids, eos_token_ids=ends)
    return Grammars(tree, notify, cpus)


def make_sampler(
    grammars: Grammars, defaults: "GenerationDefaults", cpus: tuple[int, ...]
) -> "Sampler":
    """Return a sampler that follows ``grammars`` with a thread on ``cpus``."""
    from ....gpu.execution.sampler import Sampler

    return Sampler(defaults.eos_token_ids, grammars.matcher, cpus)
