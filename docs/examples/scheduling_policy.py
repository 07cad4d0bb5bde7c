"""A scheduling policy of your own: the shortest prompt goes first."""

from bisect import insort
from collections.abc import Collection, Generator, Sequence

from corun import Engine, PolicyFacts, Request, SamplingParams, Verdict
from corun.runtime.demo import chat_prompt


def size(request: Request) -> tuple[int, int]:
    """Order by length, then by arrival."""
    return request.num_prompt_tokens, request.request_id


class ShortestPromptFirst:
    """Unfair: a long prompt waits as long as shorter ones arrive."""

    def __init__(self, facts: PolicyFacts) -> None:
        self.waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, request: Request, now_s: float) -> None:
        insort(self.waiting, request, key=size)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)

    def ended(self, request: Request, now_s: float) -> None:
        pass

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        index = 0
        while index < len(self.waiting):
            verdict = yield self.waiting[index]
            if verdict is Verdict.ADMITTED:
                del self.waiting[index]
            elif verdict is Verdict.LOADING:  # requests behind it may pass
                index += 1
            else:
                return

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        return self.waiting[:max_requests]  # their adapters are loaded ahead

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        return sorted(requests, key=size)

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        return ()

    def wake_at_s(self) -> float | None:
        return None

    def victim(self, running: Collection[Request]) -> Request:
        return max(running, key=size)


with Engine(scheduling_policy=ShortestPromptFirst) as engine:
    prompts = [chat_prompt("one two three"), chat_prompt("one")]
    for output in engine.generate(prompts, SamplingParams(temperature=0, max_tokens=32)):
        print(output.outputs[0].text)  # You said: one two three, then You said: one
