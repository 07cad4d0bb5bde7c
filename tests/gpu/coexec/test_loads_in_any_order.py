"""Loads, prefetches, promotions, evictions, unloads, failures and aborts come in any order."""

import random

import hypothesis.strategies as st
from corun.runtime.plan import RequestId
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.loading_engine import CONTENTS, LoadingEngine


class LoadsInAnyOrder(RuleBasedStateMachine):
    """Nothing is left at the end, and no request gets another adapter's deltas."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: LoadingEngine | None = None

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.engine = LoadingEngine(random.Random(seed))

    @property
    def loading(self) -> LoadingEngine:
        assert self.engine is not None
        return self.engine

    @rule(
        indices=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        num_tokens=st.integers(1, 20),
        num_steps=st.integers(0, 3),
    )
    def ask(self, indices: list[int], num_tokens: int, num_steps: int) -> None:
        for index in indices:
            if CONTENTS[index] in self.loading.served:
                self.loading.ask(CONTENTS[index], num_tokens)
        self.step(num_steps)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.loading.step()

    @rule(is_open=st.booleans(), num_copies=st.integers(1, 4), num_steps=st.integers(0, 2))
    def hold_or_open_the_link(self, is_open: bool, num_copies: int, num_steps: int) -> None:
        self.loading.link.is_open = is_open
        self.loading.link.let(num_copies)
        self.step(num_steps)

    @rule(num_copies=st.integers(1, 2))
    def fail_copies(self, num_copies: int) -> None:
        self.loading.link.num_to_fail = num_copies

    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        live = sorted(self.loading.live)  # which depends on how fast the link's threads are
        if live:
            self.loading.abort(RequestId(live[index % len(live)]))

    @rule(index=st.integers(0, 2))
    def unload_or_register(self, index: int) -> None:
        name = CONTENTS[index]
        if name in self.loading.served:
            self.loading.unload(name)
        else:
            self.loading.register(name)

    def teardown(self) -> None:
        if self.engine is None:
            return
        try:
            self.engine.drain()
            self.engine.check_nothing_is_left()
        finally:
            self.engine.close()


TestLoadsInAnyOrder = LoadsInAnyOrder.TestCase
TestLoadsInAnyOrder.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=20, stateful_step_count=25
)
