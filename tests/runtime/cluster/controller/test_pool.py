"""No last copy is lost while agents evict, leave and restart at the same time."""

from corun.runtime.cluster.controller.pool import CopyPool
from corun.runtime.cluster.wire import AdapterEntry, AgentOrders, AgentReport
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

_AGENTS = ("a", "b", "c")
_DIGESTS = ("p", "q")
_ENTRIES = [
    AdapterEntry(name=one, revision=1, digest=one, rank=8, num_bytes=1, source="/s") for one in _DIGESTS
]


def report_of(agent_id: str, copies: set[str], keeps: set[str]) -> AgentReport:
    return AgentReport(
        agent_id=agent_id,
        url="http://a",
        engines=(),
        copies=dict.fromkeys(copies, 0.0),
        store_bytes=1,
        used_bytes=1,
        core_division="",
        keeps=tuple(keeps),
    )


def orders_of(pool: CopyPool, agent_id: str, copies: set[str], keeps: set[str]) -> AgentOrders:
    pool.report(report_of(agent_id, copies, keeps))
    return pool.orders(agent_id, _ENTRIES, frozenset(), frozenset(), frozenset())


def test_a_copy_is_released_once_another_agent_says_that_it_keeps_one() -> None:
    pool = CopyPool()
    assert orders_of(pool, "a", {"p"}, set()).keep == ("p",)
    assert orders_of(pool, "b", {"p"}, set()).keep == ("p",)  # the other has not reported yet
    assert orders_of(pool, "a", {"p"}, {"p"}).keep == ("p",)
    assert orders_of(pool, "b", {"p"}, {"p"}).keep == ()
    assert pool.only_at("a") == [] and pool.holders("p") == ["a", "b"]
    pool.set_ended({"a"})
    assert pool.only_at("a") == ["p"] and orders_of(pool, "b", {"p"}, set()).keep == ("p",)


def test_pinned_planned_or_loading_copies_stay_and_unnamed_ones_are_listed() -> None:
    pool = CopyPool()
    pinned = AdapterEntry(name="x", revision=1, digest="p", rank=8, num_bytes=1, source="/s", pinned=True)
    for agent_id in "ab":
        pool.report(report_of(agent_id, {"p", "q", "r", "s"}, {"p", "q", "r"}))
    orders = pool.orders("b", [pinned, _ENTRIES[1]], frozenset("r"), frozenset("q"), frozenset())
    assert orders == AgentOrders(keep=("p", "q", "r"), unneeded=("s",))


def test_what_the_placement_has_elsewhere_is_said_once_another_agent_keeps_it() -> None:
    pool, placed = CopyPool(), frozenset("pqs")
    pool.report(report_of("a", {"p", "q"}, set()))
    pool.report(report_of("b", {"p", "q", "s"}, set()))
    nothing = frozenset[str]()
    assert pool.orders("b", _ENTRIES, nothing, nothing, placed).elsewhere == ()  # the last copies
    pool.report(report_of("a", {"p", "q"}, {"p", "q"}))
    orders = pool.orders("b", _ENTRIES, nothing, frozenset("q"), placed)
    assert orders == AgentOrders(keep=("q",), unneeded=("s",), elsewhere=("p",))
    assert pool.orders("b", _ENTRIES, frozenset("p"), nothing, placed).elsewhere == ("q",)
    assert pool.orders("b", _ENTRIES, nothing, nothing, nothing).elsewhere == ()  # not there yet


class Evictions(RuleBasedStateMachine):
    """Agents evict all that they may, while reports and answers are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = CopyPool()
        self.copies = {one: set[str]() for one in _AGENTS}
        self.released = {one: set[str]() for one in _AGENTS}
        self.sent: dict[str, AgentReport] = {}
        self.answers: dict[str, set[str]] = {}
        self.leaving: set[str] = set()
        self.gone: set[str] = set()
        self.asked: set[str] = set()  # agents that have reported since an agent began to leave
        self.has_reported: set[str] = set()

    @initialize()
    def copy_to_one(self) -> None:
        self.copies["a"] |= {*_DIGESTS}

    @rule(agent_id=st.sampled_from(_AGENTS), digest=st.sampled_from(_DIGESTS))
    def fetch(self, agent_id: str, digest: str) -> None:
        if agent_id not in self.gone:
            self.copies[agent_id].add(digest)

    @rule(agent_id=st.sampled_from(_AGENTS), digest=st.sampled_from(_DIGESTS))
    def evict(self, agent_id: str, digest: str) -> None:
        if digest in self.released[agent_id]:
            self.copies[agent_id].discard(digest)
            self.released[agent_id].discard(digest)

    @rule(agent_id=st.sampled_from(_AGENTS))
    def send(self, agent_id: str) -> None:
        if agent_id not in {*self.sent, *self.answers, *self.gone}:
            copies = set(self.copies[agent_id])
            self.asked |= {agent_id}
            self.sent[agent_id] = report_of(agent_id, copies, copies - self.released[agent_id])

    @rule(agent_id=st.sampled_from(_AGENTS))
    def answer(self, agent_id: str) -> None:
        if (report := self.sent.pop(agent_id, None)) is not None:
            self.pool.report(report)
            self.has_reported |= {agent_id} & self.asked
            orders = self.pool.orders(agent_id, _ENTRIES, frozenset(), frozenset(), frozenset())
            self.answers[agent_id] = set(report.copies) - set(orders.keep)

    @rule(agent_id=st.sampled_from(_AGENTS))
    def report(self, agent_id: str) -> None:
        self.send(agent_id)
        self.answer(agent_id)
        self.receive(agent_id, is_lost=False)

    @rule(agent_id=st.sampled_from(_AGENTS), is_lost=st.booleans())
    def receive(self, agent_id: str, is_lost: bool) -> None:
        if (released := self.answers.pop(agent_id, None)) is not None and not is_lost:
            self.released[agent_id] = released

    @rule()
    def restart_controller(self) -> None:
        known = {one: self.pool.digests_of(one) for one in _AGENTS}
        self.pool = CopyPool()
        for agent_id, digests in known.items():
            self.pool.restore(agent_id, digests)
        self.pool.set_ended(self.leaving | self.gone)
        self.answers.clear()

    @rule(agent_id=st.sampled_from(_AGENTS))
    def leave(self, agent_id: str) -> None:
        if len(self.gone) < len(_AGENTS) - 1:
            self.leaving = {agent_id} - self.gone
            self.asked, self.has_reported = set(), set()
            self.pool.set_ended(self.leaving | self.gone)

    @rule()
    def end_leaving(self) -> None:
        for agent_id in self.leaving & self.has_reported:
            if not {*self.pool.only_at(agent_id)} & {*_DIGESTS}:  # the last copies have moved
                self.gone.add(agent_id)
                self.copies[agent_id].clear()
                self.sent.pop(agent_id, None)
                self.answers.pop(agent_id, None)
        self.leaving -= self.gone

    @invariant()
    def every_adapter_has_a_copy(self) -> None:
        for digest in _DIGESTS:
            assert any(digest in one for one in self.copies.values()), digest


TestEvictions = Evictions.TestCase
TestEvictions.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
