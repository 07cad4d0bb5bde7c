"""Compiles grammars beside the engine's thread, and keeps those that were used last."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from ...cpu_workers.affinity import place_thread
from ..errors import OverloadedError, RequestError
from ..sampling import StructuredOutput
from .compile import start_forcing, start_matcher
from .matcher import Matcher
from .tokenizer import TokenTree

_MAX_KEPT = 64
_MAX_WAIT_S = 10.0  # for the tree of tokens, or for a compilation and those before it

_Compiled = tuple[LLMatcher, LLMatcher, LLTokenizer]  # at its start, and for forced text


class Grammars:
    """The grammars of an engine. Each is compiled once, by a thread, and copied for each answer.

    Front ends have tried them, so none takes long, or holds Python's lock.
    """

    def __init__(self, tree: TokenTree, notify: Callable[[], None], cpus: tuple[int, ...] = ()) -> None:
        """``notify``: called by the thread when ``must_wait`` may return something else.

        ``cpus``: cores of the thread; () = those of the caller.
        """
        self._tree = tree
        self._notify = notify
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, Future[_Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "corun-grammar-compiler", partial(place_thread, cpus))

    def start(self) -> None:
        """Begin to make the tree of tokens, which other threads have to wait for. Call once."""
        self._tree.start()

    def must_wait(self, structured: StructuredOutput) -> bool:
        """Whether a request must wait for its grammar; begins to compile it."""
        return not self._begin(structured).done()

    def check(self, structured: StructuredOutput) -> None:
        """Raise ``RequestError`` if the grammar does not have to be waited for, and has failed."""
        if self._begin(structured).done():
            self._result(structured)

    def matcher(self, structured: StructuredOutput) -> Matcher:
        """Return a matcher at the start of an answer; not for the engine's thread.

        Waits for the compilation. Raises ``RequestError``.
        """
        start, forcing, tokenizer = self._result(structured)
        return Matcher(start, tokenizer, Matcher(forcing, tokenizer))

    def close(self) -> None:
        """End the thread, without what it has not begun. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, structured: StructuredOutput) -> "Future[_Compiled]":
        with self._lock:
            compiled = self._compiled.get(structured)
            if compiled is None:
                compiled = self._thread.submit(self._compile, structured)
                self._compiled[structured] = compiled
                compiled.add_done_callback(lambda _: self._notify())
                if len(self._compiled) > _MAX_KEPT:
                    self._drop_one()
            self._compiled.move_to_end(structured)
            return compiled

    def _drop_one(self) -> None:
        for structured, compiled in self._compiled.items():
            if compiled.done():
                del self._compiled[structured]
                return

    def _result(self, structured: StructuredOutput) -> _Compiled:
        try:
            return self._begin(structured).result(_MAX_WAIT_S)
        except TimeoutError:
            raise OverloadedError(
                f"{structured.field} was not compiled within {_MAX_WAIT_S:g} s; retry later"
            ) from None
        except OverloadedError:  # the tree of tokens was not ready
            with self._lock:
                self._compiled.pop(structured, None)
            raise

    def _compile(self, structured: StructuredOutput) -> _Compiled:
        tokenizer = self._tree.get(_MAX_WAIT_S)
        try:
            start = start_matcher(structured, tokenizer)
            return start, start_forcing(structured, tokenizer), tokenizer
        except RequestError:
            raise
        except BaseException as error:  # a panic of llguidance is no Exception
            raise RequestError(
                f"{structured.field} cannot be served: {type(error).__name__}: {error}",
                param=structured.field,
            ) from error
