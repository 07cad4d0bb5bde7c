"""Python's garbage collector while a process that is corun's own starts.

Importing torch and transformers makes about a million objects that stay until the end. The
collector would look at them again and again, which takes a fifth of the time of these imports.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect nothing inside. For imports and simulations: what they make is not garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_imported() -> None:
    """Never look again at anything that exists now.

    Libraries complain of leaks when such a process ends the usual way: it should ``os._exit``.
    """
    gc.freeze()


def keep_living() -> None:
    """Collect once and never look again at what is left, so that no step waits for that."""
    gc.collect()
    gc.freeze()
