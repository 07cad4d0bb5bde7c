"""Controls Python's garbage collector while one of corun's own processes starts.

Importing torch and transformers makes about a million objects that live until the end. Repeated
collections of them would take a fifth of the time of these imports.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause collection inside. For imports and simulations, which make no cyclic garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_imported() -> None:
    """Exclude all existing objects from collection.

    Libraries report leaks when such a process exits normally; it should call ``os._exit``.
    """
    gc.freeze()


def keep_living() -> None:
    """Collect once and exclude the remaining objects, so that no step waits for a collection."""
    gc.collect()
    gc.freeze()
