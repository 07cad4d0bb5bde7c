"""Variables that a process of corun's own sets before it loads a library that reads them."""

from collections.abc import Mapping

from ...cpu_workers.kernels.simd.isa import forcing_environment

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many hardware queues CUDA spreads a process's streams over; it reads it when it starts.

Streams that share a queue may hold each other up, so one that waits for a CPU worker may hold up
the others. CUDA takes 8 by itself, fewer than the engine has streams.
"""
_NUM_CONNECTIONS = 32  # as many as CUDA allows


def own_environment(cpu_isa: str, present: Mapping[str, str]) -> dict[str, str]:
    """What to set besides ``present``, where the user's number of CUDA's queues stays."""
    queues = {} if MAX_CONNECTIONS in present else {MAX_CONNECTIONS: str(_NUM_CONNECTIONS)}
    return {**forcing_environment(cpu_isa), **queues}
