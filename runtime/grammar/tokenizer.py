"""The model's vocabulary as llguidance needs it: a tree of the bytes of all tokens.

One tree serves the base and all adapters. It knows the tokens of the base's tokenizer by name; the
ids that an adapter adds are tokens without text in it, which a grammar names ``<[ID]>``. An
adapter's own end tokens are not its matter: the sampler adds them where a grammar may end.
"""

import threading
from collections.abc import Collection
from concurrent.futures import Future

from llguidance import LLTokenizer

from ..errors import OverloadedError, RequestError


def make_ll_tokenizer(backend: str, *, num_ids: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return the tree of the tokenizer with the JSON ``backend``.

    A vocabulary of 150,000 tokens takes 1 s, without letting other threads of Python run, and
    110 MB. ``num_ids``: the width of masks, at least the tokenizer's own ids and the model's
    logits. Raises ``ValueError`` for a tokenizer that llguidance cannot read.
    """
    return LLTokenizer(backend, n_vocab=num_ids, eos_token=sorted(eos_token_ids))


class TokenTree:
    """The tree of one model, made by a thread once the engine is ready."""

    def __init__(
        self, backend: str | None, *, num_ids: int, eos_token_ids: Collection[int]
    ) -> None:
        """``backend``: None = the tokenizer is not data that llguidance can read."""
        self._backend = backend
        self._num_ids = num_ids
        self._eos_token_ids = eos_token_ids
        self._made: Future[LLTokenizer] = Future()
        self._thread = threading.Thread(target=self._make, name="corun-token-tree", daemon=True)

    def start(self) -> None:
        """Begin to make the tree. Call once."""
        self._thread.start()

    def get(self, timeout_s: float) -> LLTokenizer:
        """Return the tree, once it is made; never on a thread that must not wait.

        Raises ``OverloadedError`` after ``timeout_s``, ``RequestError`` if there is none.
        """
        try:
            return self._made.result(timeout_s)
        except TimeoutError:
            raise OverloadedError(
                f"the tokens of the model were not ready for structured output within "
                f"{timeout_s:g} s; retry later"
            ) from None
        except ValueError as error:
            raise RequestError(
                f"structured output cannot be served with the model's tokenizer: {error}",
                param="structured_output",
            ) from None

    def _make(self) -> None:
        try:
            if self._backend is None:
                raise ValueError("it is implemented in Python")
            self._made.set_result(
                make_ll_tokenizer(
                    self._backend, num_ids=self._num_ids, eos_token_ids=self._eos_token_ids
                )
            )
        except ValueError as error:
            self._made.set_exception(error)
        except BaseException as error:  # a panic of llguidance is no Exception
            self._made.set_exception(ValueError(str(error)))
        self._backend = None
