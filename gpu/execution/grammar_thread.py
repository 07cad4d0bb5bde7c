"""The thread that fills the masks of grammars while the device computes.

A row's mask depends only on its tokens so far. So it is filled from the end of one step on, and
awaited when the next one samples the row.
"""

import queue
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...cpu_workers.affinity import place_thread
from .request_table import RequestState
from .row_grammar import Filling, MakeMatcher, RowGrammar

_Work = list[tuple[RowGrammar, NDArray[np.int64]]]  # rows, and copies of their outputs


class GrammarThread:
    """Owns the thread. All methods belong to the engine's thread."""

    def __init__(
        self, make: MakeMatcher, eos_token_ids: Sequence[int], cpus: tuple[int, ...] = ()
    ) -> None:
        """``make``: called by the thread; ``cpus``: its cores, () = those of the caller."""
        self._make = make
        self._eos_token_ids = eos_token_ids
        self._cpus = cpus
        self._work: queue.SimpleQueue[tuple[Filling, _Work] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="corun-grammars", daemon=True)
        self._thread.start()

    def begin(self, states: Iterable[RequestState]) -> None:
        """Begin to make the matchers of new requests."""
        begun = []
        for state in states:
            structured = state.sampling.structured_output
            if structured is not None:
                # Tokens of other rows may be forbidden, or their logits are reported.
                may_force = (
                    state.sampling.structured_forced_tokens
                    and state.sampling.logprobs is None
                    and state.token_rules is None
                )
                state.grammar = RowGrammar(
                    self._make, structured, state.sampling, self._eos_token_ids,
                    may_force=may_force,
                )  # fmt: skip
                begun.append(state)
        self.fill(begun)

    def fill(self, states: Iterable[RequestState]) -> None:
        """Begin to fill the masks of the tokens that come next in these rows."""
        work = [
            (state.grammar, state.output.copy()) for state in states if state.grammar is not None
        ]
        if not work:
            return
        filling = Filling()
        for grammar, _ in work:
            grammar.filling = filling
        self._work.put((filling, work))

    def close(self) -> None:
        """End the thread, without what it has not begun. Idempotent."""
        self._is_closed = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        place_thread(self._cpus)
        while (taken := self._work.get()) is not None and not self._is_closed:
            filling, work = taken
            for grammar, output in work:
                grammar.fill(output)
            filling.end()
