"""Draws tokens at random on the device, without waiting for it.

Draws use one uniform number per (seed, position), so a request's tokens do not depend on its
neighbours. A row without top_k, top_p and min_p is drawn over the vocabulary in its own order; the
others over candidates, most likely first.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.sampling import SamplingParams
from .logprobs import largest
from .request_table import RequestState

_NUM_CANDIDATES = 1024  # the nucleus is searched among these before sorting the vocabulary
_UINT64_MASK = 2**64 - 1
_UNLIMITED = 2**63 - 1
_SMALLEST = np.finfo(np.float32).tiny


_MULTIPLIER_A = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_B = np.uint64(0x94D049BB133111EB)
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


# A request draws the same numbers whether it runs alone, in a batch, after a preemption or in
# another process; there is no generator state that a batch could share.
def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position): float64 of the same shape.

    Numbers have 52 bits, so that the product with a positive one is always below that one.

    Two rounds of the splitmix64 finaliser; the seed is mixed before the position is added, so that
    neighbouring seeds share no stream. Source: Steele, Lea, Flood, OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _INCREMENT)
        bits = _mix(state + positions * _INCREMENT)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLIER_A
    value = (value ^ (value >> np.uint64(27))) * _MULTIPLIER_B
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows of a step that draw at random: first those that may draw every token."""

    rows: list[int]
    num_whole: int  # rows that may draw every token
    num_candidates: int  # of the other rows
    arrays: dict[str, NDArray[np.generic]]  # their parameters, to be uploaded

    @classmethod
    def of(cls, states: Sequence[RequestState]) -> "RandomRows | None":
        """Return None if all rows are greedy."""
        whole: list[int] = []
        cut: list[int] = []
        for row, state in enumerate(states):
            sampling = state.sampling
            if sampling.temperature > 0:
                is_cut = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
                (cut if is_cut else whole).append(row)
        rows = whole + cut
        if not rows:
            return None
        params = [states[row].sampling for row in rows]
        temperatures = np.array([one.temperature for one in params], dtype=np.float32)
        arrays: dict[str, NDArray[np.generic]] = {
            "random_rows": np.array(rows, dtype=np.int64),
            # A positive value must not become 0.
            "temperatures": np.maximum(temperatures, _SMALLEST)[:, None],
            "numbers": uniform(
                np.array([(one.seed or 0) & _UINT64_MASK for one in params], dtype=np.uint64),
                np.array([states[row].num_tokens for row in rows], dtype=np.uint64),
            )[:, None],
        }
        if cut:
            arrays |= _cut_arrays(params[len(whole) :])
        most = max((one.top_k for one in params), default=0)
        return cls(rows, len(whole), max(_NUM_CANDIDATES, 2 * most), arrays)


class _Cut(NamedTuple):
    """What a row may draw; each [rows, 1]."""

    numbers: torch.Tensor  # float64
    min_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float64
    has_limit: torch.Tensor  # bool: min_p or top_k excludes tokens


class Draws:
    """The tokens that the rows of one step draw."""

    def __init__(
        self,
        random: RandomRows,
        sent: Mapping[str, torch.Tensor],
        logits: torch.Tensor,
        best: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Draw.

        ``sent``: the arrays of ``random`` on the device. logits: float32 [rows, vocabulary], is
        changed. best: float32 and int64 [rows], the largest logits and their tokens.
        """
        rows = sent["random_rows"]
        is_all = random.rows == list(range(len(logits)))
        part, maxima = logits, best[0]
        if not is_all:
            part, maxima = logits.index_select(0, rows), maxima.index_select(0, rows)
        # The maximum is subtracted first: a tiny temperature must not turn it into infinity.
        part -= maxima[:, None]
        part /= sent["temperatures"]
        probs = torch.softmax(part, dim=-1)
        del part  # a copy takes much memory
        numbers = sent["numbers"]
        whole = random.num_whole
        self._cut_rows = random.rows[whole:]
        # bool [rows with top_k, top_p or min_p]: whether more candidates would change nothing;
        # None = all rows are drawn, or the device draws the others itself.
        self.is_complete: torch.Tensor | None = None
        drawn = []
        if whole:
            drawn.append(_invert(probs[:whole], numbers[:whole]))
        if self._cut_rows:
            self._probs, self._rows = probs[whole:], rows[whole:]
            self._cut = _Cut(numbers[whole:], sent["min_p"], sent["top_k"], sent["top_p"], sent["has_limit"])
            most = _NUM_CANDIDATES if probs.is_cuda else random.num_candidates
            found, is_complete = _draw_cut(self._probs, self._cut, min(most, probs.shape[1]))
            if probs.is_cuda:
                _draw_rest(found, self._probs, is_complete, self._cut)
            else:
                self.is_complete = is_complete
            drawn.append(found)
        tokens = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        self.tokens = tokens if is_all else best[1].index_copy(0, rows, tokens)  # int64 [rows]

    def complete(self, is_complete: Sequence[float], failed: Container[int]) -> bool:
        """Draw rows that needed more candidates from the whole vocabulary; False = there are none.

        ``is_complete``: its values, on a CPU. ``failed``: rows with an error; their tokens are not used.
        """
        open_rows = [
            index
            for index, (row, value) in enumerate(zip(self._cut_rows, is_complete, strict=True))
            if not value and row not in failed
        ]
        if not open_rows:
            return False
        picked = torch.tensor(open_rows)
        probs = self._probs.index_select(0, picked)
        cut = _Cut(*(values.index_select(0, picked) for values in self._cut))
        found, _ = _draw_cut(probs, cut, probs.shape[1])
        self.tokens.index_copy_(0, self._rows.index_select(0, picked), found)
        return True


def _cut_arrays(params: Sequence[SamplingParams]) -> dict[str, NDArray[np.generic]]:
    top_k = [one.top_k if one.top_k > 0 else _UNLIMITED for one in params]
    return {
        "min_p": np.array([[one.min_p] for one in params], dtype=np.float32),
        "top_k": np.array(top_k, dtype=np.int64)[:, None],
        "top_p": np.array([[one.top_p] for one in params], dtype=np.float64),
        "has_limit": np.array([[one.top_k > 0 or one.min_p > 0.0] for one in params]),
    }


def _draw_cut(probs: torch.Tensor, cut: _Cut, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply min_p, then top_k, then the top_p nucleus of the rest; draw from what remains.

    Returns tokens, int64 [rows], and for each row whether more candidates would change nothing.
    Then the row does not depend on their number, and so not on its neighbours.
    """
    values, order = largest(probs, num_candidates)
    ranks = torch.arange(num_candidates, device=probs.device)
    first_kept = (values >= cut.min_p * values[:, :1]) & (ranks < cut.top_k)
    first_values = values * first_kept
    total = first_values.cumsum(dim=-1, dtype=torch.float64)
    # The mass that top_p refers to: of the kept tokens, or of all tokens without another limit.
    mass = torch.where(cut.has_limit, total[:, -1:], 1.0)
    # The token that crosses top_p is part of the nucleus, and so the first one.
    kept = first_values * (total - first_values < cut.top_p * mass)
    # Nothing is missing if the last candidate is less likely than all deciding ones: of equally
    # likely tokens, only some may be among the candidates.
    deciding = torch.where(cut.has_limit, first_values, kept)
    least = deciding.masked_fill(deciding == 0, float("inf")).amin(dim=-1)
    columns = _invert(kept, cut.numbers)
    return order.gather(1, columns[:, None])[:, 0], least > values[:, -1]


def warm_up_draws(logits: torch.Tensor) -> None:
    """Compile or load the kernel of a CUDA device; ``logits``: float32 [rows, vocabulary]."""
    if logits.is_cuda:
        none = logits.new_zeros((1, 1))
        cut = _Cut(none.double(), none, none.long(), none.double(), none.bool())
        _draw_rest(none.long()[0], logits[:1], torch.ones_like(cut.has_limit[0]), cut)


def _draw_rest(found: torch.Tensor, probs: torch.Tensor, is_complete: torch.Tensor, cut: _Cut) -> None:
    """Draw rows that need more candidates on the device, which alone knows of them."""
    from .triton_kernels import draw_rest_on_cuda

    draw_rest_on_cuda(found, probs, is_complete, cut)


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """First column with a cumulative probability above ``number`` times the row's total.

    numbers: float64 [rows, 1]. Returns int64 [rows]; rows that are not finite have any column.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1:].contiguous()
    columns = torch.searchsorted(cumulative, numbers * totals, right=True)
    return columns[:, 0].clamp_(max=probs.shape[1] - 1)
