"""A CPU worker: ``python -m corun.cpu_workers.worker --fd N --parent-pid PID``.

Started by the supervisor with the right environment; the first message on descriptor N says who
it is. It pins itself before it imports anything that starts threads, attaches to the segments,
loads its kernels, and takes jobs as long as its mailbox says that it runs. It writes y, results
and its own words there, and nothing else.
"""

import argparse
import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Sequence

from .affinity import pin_thread
from .link import Link
from .messages import Prepared, Refused, ToWorker, WorkerSetup
from .process_life import OrphanError, die_with_parent, ignore_group_signals

_SETUP_TIMEOUT_S = 30.0
_LOG = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; return its exit status."""
    parser = argparse.ArgumentParser(prog="corun worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        die_with_parent(options.parent_pid)
    except OrphanError:
        return 1
    ignore_group_signals()
    faulthandler.enable()
    os.set_inheritable(options.fd, False)
    link: Link[ToWorker] = Link(socket.socket(fileno=options.fd), ToWorker)
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
        # Not before it is pinned: numeric libraries look at the CPUs when they are loaded.
        from .job_loop import JobLoop

        loop = JobLoop(setup)
    except Exception as error:
        _LOG.exception("worker %d cannot start", setup.worker)
        link.send(Refused(f"{type(error).__name__}: {error}"))
        return 1
    link.send(Prepared(None if pinning.is_exact else pinning.describe(), loop.describe()))
    return 0 if loop.run() else 1


if __name__ == "__main__":
    sys.exit(main())
