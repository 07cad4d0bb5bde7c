"""Follow-up requests of sessions, and the contents that their prompts share. Pure."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np

from .draw_inputs import Drawn
from .workload_spec import SessionSpec

CONTENT_TOKENS = 16  # of a prompt that one id stands for


def with_follow_ups(drawn: Drawn, spec: SessionSpec, rng: np.random.Generator) -> Drawn:
    """Make some requests follow-ups of earlier ones, with their sessions and adapters.

    Lengths and arrivals stay. The earlier request is drawn among the last requests of sessions,
    if it is neither too new nor too old; without one, the request begins a session.
    """
    if not spec.follow_up_share:
        return drawn
    arrival_s = drawn.arrival_s.tolist()
    adapters, session = drawn.adapters.copy(), np.arange(len(arrival_s))
    wants = rng.random(len(arrival_s)) < spec.follow_up_share
    shares = rng.random(len(arrival_s))
    too_new: deque[int] = deque()
    open_ends: list[int] = []  # by arrival
    for index, now_s in enumerate(arrival_s):
        while too_new and arrival_s[too_new[0]] <= now_s - spec.min_gap_s:
            open_ends.append(too_new.popleft())
        num_old = bisect_left(open_ends, now_s - spec.max_gap_s, key=arrival_s.__getitem__)
        del open_ends[:num_old]
        if wants[index] and open_ends:
            before = open_ends.pop(int(shares[index] * len(open_ends)))
            adapters[index], session[index] = adapters[before], session[before]
        too_new.append(index)
    return replace(drawn, adapters=adapters, session=session)


def shared_contents(sessions: Iterable[int], prompt_tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Ids of each prompt's contents: prompts of one session share their beginning.

    The shorter of two is a prefix of the longer. See ``WorkloadRequest.content_ids``.
    """
    ids = count()
    known: dict[int, tuple[int, ...]] = {}
    contents = []
    for session, num_tokens in zip(sessions, prompt_tokens, strict=True):
        wanted = num_tokens // CONTENT_TOKENS
        longest = known.get(session, ())
        if len(longest) < wanted:
            longest = known[session] = (*longest, *islice(ids, wanted - len(longest)))
        contents.append(longest[:wanted])
    return contents
