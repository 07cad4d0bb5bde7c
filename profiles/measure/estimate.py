"""Estimates the duration of measuring. Pure."""

from collections.abc import Callable, Sequence

from ..rounds import Repeats
from .effort import BATCH_SIZES, Effort
from .step_shapes import StepShape, first_of_size, num_needed

_START_S = 2.0  # of a process with its libraries


def cut(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """The ``sizes`` below ``limit``, and ``limit`` itself: the largest permitted size counts."""
    return (*(size for size in sizes if size < limit), limit)


def expected_s(
    effort: Effort, step_s: Callable[[int], float], max_tokens: int, shapes: Sequence[StepShape],
    *, has_workers: bool,
) -> dict[str, float]:  # fmt: skip
    """Seconds of each part, in their order.

    ``step_s``: one forward, by its number of tokens; ``shapes``: of the whole steps. A part ends
    after its last round or with its budget, whichever is sooner, but not before its minimum number
    of rounds over the sizes that it needs.
    """
    prefill = [
        step_s(min(n, max_tokens)) for n in effort.prefill_tokens for _ in effort.prefill_ranks
    ]
    batches = [step_s(n) for n in BATCH_SIZES for _ in range(effort.num_batches)]
    first = first_of_size(shapes)  # these are measured with a forward beside them
    costs = {
        "base": [step_s(n) for n in cut(effort.step_tokens, max_tokens)],
        "steps": [(1 + (shape in first)) * step_s(shape.total_tokens) for shape in shapes],
        "lora_decode": batches,
        "lora_prefill": prefill,
    }
    needed = {"steps": num_needed(shapes)}
    result = {}
    for part in effort.parts:
        repeats = effort.repeats(part)
        seconds = repeats.budget_s
        if part in costs:
            seconds = _bounded_s(repeats, costs[part], needed.get(part, 2))
        elif part == "deltas":
            seconds += _START_S
        elif part == "invocation":
            seconds = seconds + _START_S if has_workers else 0.0
        result[part] = seconds
    return result


def _bounded_s(repeats: Repeats, costs_s: Sequence[float], num_sizes: int) -> float:
    least_s = (repeats.min_rounds + 1) * sum(costs_s[:num_sizes])
    return max(least_s, min(repeats.budget_s, (repeats.max_rounds + 1) * sum(costs_s)))
