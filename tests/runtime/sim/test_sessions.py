"""Follow-up requests: the requests that they follow, and the shared part of their prompts."""

import numpy as np
import pytest
from corun.runtime.sim.draw_inputs import Drawn
from corun.runtime.sim.workload_spec import SessionSpec
from corun.runtime.sim.workloads import CONTENT_TOKENS, shared_contents, with_follow_ups


def drawn(arrival_s: list[float]) -> Drawn:
    number = len(arrival_s)
    same = np.full(number, 100)
    return Drawn(np.array(arrival_s), same, same, np.arange(number), (8,) * number, 100.0)


def test_nobody_follows_unless_asked() -> None:
    columns = drawn([0.0, 1.0])
    assert with_follow_ups(columns, SessionSpec(), np.random.default_rng(1)) is columns


@pytest.mark.parametrize("seed", range(5))
def test_who_follows_comes_neither_too_soon_nor_too_late_and_nobody_is_followed_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = drawn(np.cumsum(rng.exponential(1.0, 500)).tolist())
    spec = SessionSpec(follow_up_share=0.7, min_gap_s=4.0, max_gap_s=30.0)
    after = with_follow_ups(columns, spec, np.random.default_rng(seed))
    assert after.session is not None
    turns: dict[int, list[int]] = {}
    for index, session in enumerate(after.session.tolist()):
        turns.setdefault(session, []).append(index)
    assert max(map(len, turns.values())) > 3
    for first, of_session in turns.items():
        assert of_session[0] == first
        assert {int(after.adapters[index]) for index in of_session} == {first}
        gaps_s = np.diff(columns.arrival_s[of_session])
        assert ((gaps_s >= 4.0) & (gaps_s <= 30.0)).all()
    assert (columns.adapters == np.arange(500)).all()  # those before are as they were


def test_the_first_ones_have_nobody_to_follow() -> None:
    after = with_follow_ups(
        drawn([0.0, 1.0, 9.0, 400.0]), SessionSpec(follow_up_share=1.0), np.random.default_rng(1)
    )
    assert after.session is not None and after.session.tolist() == [0, 1, 2, 3]


def test_prompts_of_a_session_begin_alike_and_others_share_nothing() -> None:
    lengths = [3 * CONTENT_TOKENS + 5, 2 * CONTENT_TOKENS, CONTENT_TOKENS, 5 * CONTENT_TOKENS, 7]
    one, other, shorter, longer, tiny = shared_contents([4, 9, 4, 4, 4], lengths)
    assert (len(one), len(other), len(shorter), len(longer), len(tiny)) == (3, 2, 1, 5, 0)
    assert longer[:3] == one and one[:1] == shorter
    assert len({*longer, *other}) == 7
