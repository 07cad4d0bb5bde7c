"""Errors of shared memory: their own tree, since this folder imports nothing of corun."""


class ShmError(Exception):
    """Base of all errors of this folder."""


class SpaceError(ShmError):
    """Shared memory could not be allocated: the machine has too little left."""

    def __init__(self, what: str, needed_bytes: int, available_bytes: int, hint: str) -> None:
        super().__init__(
            f"{what} needs {needed_bytes} bytes of shared memory, {available_bytes} are available; {hint}"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class FormatError(ShmError):
    """A descriptor does not contain the expected segment."""


class MailboxFullError(ShmError):
    """No slot is free: take results before publishing more jobs."""


class RowsFullError(ShmError):
    """A pass has more tokens than the workers' memory has rows."""


class WorkerUnavailableError(ShmError):
    """A worker accepts no jobs: it is starting, stopping or dead."""


class WaitTimeoutError(ShmError):
    """A word did not reach its value before the deadline."""


class PeerDeadError(ShmError):
    """The process that should have written a word is dead."""
