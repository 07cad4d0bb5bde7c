"""The model's vocabulary as llguidance needs it: a tree of the bytes of all tokens.

One tree serves the base and all adapters. It knows the tokens of the base's tokenizer by name; the
ids that an adapter adds are tokens without text in it, which a grammar names ``<[ID]>``. An
adapter's own end tokens are not its matter: the sampler adds them where a grammar may end.
"""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future

from llguidance import LLTokenizer, TokenizerWrapper

from ..errors import OverloadedError, RequestError


def make_ll_tokenizer(backend: str, *, num_ids: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return the tree of the tokenizer with the JSON ``backend``.

    A vocabulary of 150,000 tokens takes 1 s, without letting other threads of Python run, and
    110 MB. ``num_ids``: the width of masks, at least the tokenizer's own ids and the model's
    logits. Raises ``ValueError`` for a tokenizer that llguidance cannot read.
    """
    return LLTokenizer(backend, n_vocab=num_ids, eos_token=sorted(eos_token_ids))


def trial_tokenizer(num_ids: int, special_tokens: Mapping[int, str]) -> LLTokenizer:
    """Return a small tree of single bytes that knows the names and ids of ``special_tokens``.

    A grammar that is valid for it is valid for the model's own tree. Takes 0.1 s for 150,000 ids.
    """
    return LLTokenizer(TokenizerWrapper(_Bytes(num_ids, special_tokens)), slices=[])


class _Bytes:
    """See ``TokenizerWrapper``: the first ids that are no special tokens are the bytes."""

    bos_token_id = None

    def __init__(self, num_ids: int, special_tokens: Mapping[int, str]) -> None:
        num_all = max(num_ids, len(special_tokens) + 257)
        self.tokens = [b""] * num_all
        free = (one for one in range(num_all) if one not in special_tokens)
        self._ids = [next(free) for _ in range(256)]
        for byte, token_id in enumerate(self._ids):
            self.tokens[token_id] = bytes([byte])
        self.eos_token_id = next(free)
        self.special_token_ids = [*special_tokens, self.eos_token_id]
        self.tokens[self.eos_token_id] = b"<|end of the trial|>"
        for token_id, name in special_tokens.items():
            self.tokens[token_id] = name.encode()

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class TokenTree:
    """The tree of one model, made by a thread once the engine is ready."""

    def __init__(self, backend: str | None, *, num_ids: int, eos_token_ids: Collection[int]) -> None:
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
                make_ll_tokenizer(self._backend, num_ids=self._num_ids, eos_token_ids=self._eos_token_ids)
            )
        except ValueError as error:
            self._made.set_exception(error)
        except BaseException as error:  # a panic of llguidance is no Exception
            self._made.set_exception(ValueError(str(error)))
        self._backend = None
