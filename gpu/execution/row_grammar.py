"""The grammar of a row: what the row may draw next, and whether its answer has ended."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import CorunError, StepFailedError
from ...runtime.grammar.matcher import Matcher
from ...runtime.sampling import SamplingParams, StructuredOutput

MakeMatcher = Callable[[StructuredOutput], Matcher]  # raises ``RequestError``

_MASK_TIMEOUT_S = 10.0  # limits of grammars keep a mask below 10 ms, and a compilation below 1 s


class Filling:
    """The work of a thread on some rows. A lock costs less than a future, in each step."""

    __slots__ = ("_is_under_way",)

    def __init__(self) -> None:
        self._is_under_way = threading.Lock()
        self._is_under_way.acquire()

    def end(self) -> None:
        self._is_under_way.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False = it has not."""
        has_ended = self._is_under_way.acquire(timeout=timeout_s)
        if has_ended:
            self._is_under_way.release()
        return has_ended


class RowGrammar:
    """The grammar of one request."""

    def __init__(
        self,
        make: MakeMatcher,
        structured: StructuredOutput,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        *,
        may_force: bool,
    ) -> None:
        """``eos_token_ids``: the base model's; an adapter's are among the stop tokens.

        ``may_force``: text without a choice need not be drawn token by token.
        """
        self._make = make
        self._structured = structured
        self._ends = frozenset((*eos_token_ids, *sampling.stop_token_ids))
        self._drawable_ends = frozenset(sampling.stop_token_ids) if sampling.ignore_eos else self._ends
        self._min_tokens = sampling.min_tokens
        self._may_force = may_force
        self._matcher: Matcher | None = None
        self._words: NDArray[np.int32] | None = None
        self._error: CorunError | None = None
        self.filling: Filling | None = None  # of a thread that works on this row

    def fill(self, output: NDArray[np.int64]) -> None:
        """Compute the words of the token after ``output``; an error is kept for ``mask``."""
        self._words = None
        try:
            if self._matcher is None:
                self._matcher = self._make(self._structured)
            self._matcher.advance(output)
            drawable = self._drawable_ends if len(output) >= self._min_tokens else ()
            self._words = self._matcher.mask(self._ends, drawable)
        except CorunError as error:
            self._error = error
        except BaseException as error:  # a panic of llguidance is no Exception
            self._error = StepFailedError(
                f"the grammar of the answer failed: {type(error).__name__}: {error}"
            )

    def mask(self, output: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the words of the tokens that may follow ``output``; see ``Matcher.mask``.

        Waits for the thread. Raises ``CorunError``.
        """
        self._wait()
        is_known = self._matcher is not None and self._matcher.is_at(output)
        if self._error is None and (self._words is None or not is_known):
            self.fill(output)  # the row is computed again from an earlier token
        if self._error is not None:
            raise self._error
        assert self._words is not None
        return self._words

    def take(self, output: NDArray[np.int64]) -> bool:
        """Consume the last token of ``output``; return whether the answer ends with it.

        Called after ``mask`` for the tokens before it. Raises ``CorunError``.
        """
        assert self._matcher is not None and self.filling is None
        if self._matcher.may_end and int(output[-1]) in self._ends:
            return True
        self._words = None
        self._matcher.advance(output)
        return self._matcher.has_ended

    def forced(self, output: NDArray[np.int64], room: int) -> list[int]:
        """Return the tokens, at most ``room``, that follow ``output`` in any case."""
        assert self._matcher is not None
        return self._matcher.forced(output)[:room] if self._may_force else []

    def _wait(self) -> None:
        """Wait for the thread's work on this row, if there is any."""
        if self.filling is None:
            return
        if not self.filling.wait(_MASK_TIMEOUT_S):
            raise StepFailedError(f"the grammar of the answer allowed no token within {_MASK_TIMEOUT_S:g} s")
        self.filling = None
