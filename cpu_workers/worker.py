"""A CPU worker: ``python -m corun.cpu_workers.worker --fd N --parent-pid PID``.

Started by the supervisor with the right environment; the first message on descriptor N identifies
it. It pins itself before it imports libraries that start threads, attaches to the segments, loads
its kernels, and takes jobs while its mailbox says that it runs. It writes only y, results and its
own words.
"""

import logging
import sys
from collections.abc import Sequence

from ..shm.light_numba import import_numba
from .affinity import pin_thread
from .ipc import Link
from .messages import Prepared, Refused, ToWorker, WorkerSetup
from .process_life import bound_socket, exit_process

_SETUP_TIMEOUT_S = 30.0
_LOG = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; return its exit status."""
    parent = bound_socket("corun worker", arguments)
    if parent is None:
        return 1
    link: Link[ToWorker] = Link(parent, ToWorker)
    setup = link.wait_one(_SETUP_TIMEOUT_S)
    if setup is None:
        return 1
    logging.basicConfig(
        level=setup.settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s worker {setup.worker}: %(message)s",
        stream=sys.stderr,
    )
    return _work(link, setup)


def _work(link: Link[ToWorker], setup: WorkerSetup) -> int:
    pinning = pin_thread([setup.cpu])
    try:
        # After pinning: numeric libraries read the available CPUs when they are loaded.
        import_numba()
        from .job_loop import JobLoop

        loop = JobLoop(setup)
    except Exception as error:
        _LOG.exception("worker %d cannot start", setup.worker)
        link.send(Refused(f"{type(error).__name__}: {error}"))
        return 1
    link.send(Prepared(None if pinning.is_exact else pinning.describe(), loop.describe()))
    return 0 if loop.run() else 1


if __name__ == "__main__":
    exit_process(main())
