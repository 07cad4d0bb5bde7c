"""The back ends of one worker, and the choice for each job."""

from ...shm.region import Region
from .base import BACKEND_NAMES, DeltaBackend, DeltaJob, shape_of
from .table import DeltaTable

_MAX_KEPT = 4096  # cached choices: groups of adapters times numbers of tokens


def make_backend(name: str) -> DeltaBackend:
    """A back end by name; imports its libraries, torch only for ``torch``."""
    if name == "numba":
        from .numba_backend import NumbaDelta

        return NumbaDelta()
    if name == "numpy":
        from .numpy_backend import NumpyDelta

        return NumpyDelta()
    if name == "torch":
        from .torch_backend import TorchDelta

        return TorchDelta()
    raise ValueError(f"delta back ends are {', '.join(BACKEND_NAMES)}; not {name}")


class Deltas:
    """Computes jobs, each with the back end that the table predicts to be the fastest.

    For one thread: back ends own scratch memory.
    """

    def __init__(self, table: DeltaTable) -> None:
        self._table = table
        self._backends = {name: make_backend(name) for name in table.backends}
        self._chosen: dict[tuple[Region, int], DeltaBackend] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The back ends to choose from."""
        return tuple(self._backends)

    def choose(self, region: Region, num_tokens: int) -> DeltaBackend:
        """Choose the back end for a job; raises ``FormatError`` if workers do not support it.

        Choices are cached: all layers of an adapter have the same shapes.
        """
        key = region, num_tokens
        backend = self._chosen.get(key)
        if backend is None:
            shape = shape_of(region, num_tokens)
            if len(self._chosen) >= _MAX_KEPT:
                self._chosen.clear()
            backend = self._backends[self._table.best(shape)]
            self._chosen[key] = backend
        return backend

    def compute(self, job: DeltaJob) -> None:
        self.choose(job.region, job.num_tokens).compute(job)
