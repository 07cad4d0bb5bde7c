"""Environment variables that a corun process sets before it loads the libraries that read them."""

from collections.abc import Mapping

from ...cpu_workers.kernels.simd.isa import forcing_environment

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Number of hardware queues for the streams of a process; CUDA reads it when it starts.

Streams that share a queue can block each other, so a stream that waits for a CPU worker can block
the rest. CUDA's default of 8 is less than the number of streams of the engine.
"""
_NUM_CONNECTIONS = 32  # the maximum of CUDA


def own_environment(cpu_isa: str, present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set; a number of queues in ``present`` stays."""
    queues = {} if MAX_CONNECTIONS in present else {MAX_CONNECTIONS: str(_NUM_CONNECTIONS)}
    return {**forcing_environment(cpu_isa), **queues}
