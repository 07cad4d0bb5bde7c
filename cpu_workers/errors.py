"""What the CPU workers raise. This folder imports nothing of the runtime: it has its own tree."""


class WorkerPoolError(Exception):
    """The workers cannot be had: they do not start, or do not come back."""
