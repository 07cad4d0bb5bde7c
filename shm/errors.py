"""What shared memory raises: a small tree of its own, since this folder imports nothing inside."""


class ShmError(Exception):
    """Base of all errors of this folder: a machine, a file or a peer did not do what was needed."""


class SpaceError(ShmError):
    """Shared memory could not be allocated: the machine has too little left."""

    def __init__(self, what: str, needed_bytes: int, available_bytes: int, hint: str) -> None:
        super().__init__(
            f"{what} needs {needed_bytes} bytes of shared memory, {available_bytes} are "
            f"available; {hint}"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class FormatError(ShmError):
    """A descriptor does not hold the segment that was expected of it."""


class MailboxFullError(ShmError):
    """No slot is free: results must be taken before more jobs are published."""


class RingFullError(ShmError):
    """More jobs should be under way than a worker's rings have slots for their x and y."""


class WorkerUnavailableError(ShmError):
    """The worker of a mailbox takes no jobs: it is starting, stopping or dead."""


class WaitTimeoutError(ShmError):
    """A word did not reach its value before the deadline."""


class PeerDeadError(ShmError):
    """Whoever should have written a word is dead."""
