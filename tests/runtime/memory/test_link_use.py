"""Busy time of a link by ready transfers, and bytes by progress."""

from corun.profiles.link import Direction
from corun.runtime.memory.link_use import LinkKey
from support.open_transfers import Loads

ADAPTERS = LinkKey(Direction.TO_DEVICE, "adapter")


def test_copies_at_once_are_busy_once() -> None:
    loads = Loads()
    loads.begin(1, (5, 5), 1.0)
    loads.begin(2, (7,), 2.0)
    use = loads.table.link_use
    assert use.totals(4.0) == {ADAPTERS: (0, 3.0)}
    loads.arrived(1, 1, 4.0)
    loads.end(1, 5.0)
    assert use.totals(6.0) == {ADAPTERS: (10, 5.0)}
    loads.end(2, 6.0)
    assert use.totals(100.0) == {ADAPTERS: (17, 5.0)}


def test_who_waits_for_files_does_not_use_the_link() -> None:
    loads = Loads()
    loads.begin(1, (5, 5), 0.0, is_on_host=False)
    use = loads.table.link_use
    assert use.totals(3.0) == {ADAPTERS: (0, 0.0)}
    loads.read(1, 1, 3.0, 3.0)
    loads.arrived(1, 1, 4.0)
    assert use.totals(9.0) == {ADAPTERS: (5, 1.0)}
    loads.read(1, 2, 9.0, 9.0)
    loads.end(1, 10.0)
    assert use.totals(11.0) == {ADAPTERS: (10, 2.0)}


def test_what_has_failed_does_not_count() -> None:
    loads = Loads()
    load = loads.begin(1, (5, 5), 0.0)
    loads.arrived(1, 1, 1.0)
    loads.table.end(load.transfer_id, 2.0, has_failed=True)
    assert loads.table.link_use.totals(9.0) == {ADAPTERS: (5, 2.0)}
