"""Errors of the CPU workers. This folder has its own tree and imports nothing of the runtime."""


class WorkerPoolError(Exception):
    """CPU workers are not available: they do not start, or do not restart."""
