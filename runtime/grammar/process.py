"""The process that tries grammars: ``python -m corun.runtime.grammar.process --fd N ...``.

A hostile schema may need minutes, gigabytes or a deep stack, and a thread cannot be ended. This
process can: its parent kills it at a deadline. Limits of memory and of the stack end it before the
same grammar could harm the engine. It dies with its parent.

The first message is a ``GrammarTokens``; the answer says that the process is ready. Each later one
is a ``StructuredOutput``; the answer is the reason why it is refused, or nil.
"""

import os
import resource
import sys
import threading
import time
from typing import BinaryIO

import msgspec

from ...cpu_workers.process_life import bound_socket, exit_process
from ..errors import RequestError
from ..sampling import StructuredOutput
from .compile import check_structure
from .messages import LENGTH_BYTES, GrammarTokens, frame
from .tokenizer import trial_tokenizer

_MAX_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 1 << 20  # less than a thread of the engine has
_MAX_CPU_S = 0.25  # the engine needs as much again
_NICE = 5  # streams come first


def main(arguments: list[str] | None = None) -> int:
    """Run the process; return its exit status."""
    sock = bound_socket("corun grammar", arguments)
    if sock is None:
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    os.nice(_NICE)
    threading.stack_size(_STACK_BYTES)
    with sock, sock.makefile("rwb") as stream:
        thread = threading.Thread(target=_serve, args=(stream,), daemon=True)
        thread.start()
        thread.join()
    return 0


def _serve(stream: BinaryIO) -> None:
    """Answer until the parent closes its end."""
    vocabulary = msgspec.msgpack.decode(_received(stream), type=GrammarTokens)
    tokenizer = trial_tokenizer(vocabulary.num_ids, vocabulary.special_tokens)
    reason: str | None = None
    while True:
        stream.write(frame(reason))
        stream.flush()
        payload = _received(stream)
        if not payload:
            return
        structured = msgspec.msgpack.decode(payload, type=StructuredOutput)
        reason, began_s = None, time.process_time()
        try:
            check_structure(structured, tokenizer)
        except RequestError as error:
            reason = str(error)
        except ValueError as error:  # of llguidance
            reason = f"{structured.field} cannot be served: {error}"
        took_s = time.process_time() - began_s
        if reason is None and took_s > _MAX_CPU_S:
            reason = (
                f"{structured.field} cannot be served: compiling it takes {took_s:.2f} s, at most "
                f"{_MAX_CPU_S} s are allowed"
            )


def _received(stream: BinaryIO) -> bytes:
    """Return the payload of the next frame; empty at the end."""
    return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "little"))


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
