"""The device half's state of each request between steps: its tokens and its blocks."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.plan import AdapterId, BlockUpdate, NewRequest, RequestId, TokenLogprobs
from ...runtime.sampling import SamplingParams
from ..forward.lower import BlockTables
from .row_grammar import RowGrammar
from .token_rules import TokenRules

_MIN_SLOTS = 16


_MIN_ROOM = 16


class TokenCounts:
    """Distinct tokens in the order of their first occurrence, with their counts."""

    __slots__ = ("_counts", "_index_of", "_tokens", "num_counted")

    def __init__(self) -> None:
        self.num_counted = 0  # tokens counted so far, from the start of the list
        self._index_of: dict[int, int] = {}
        self._tokens = np.empty(_MIN_ROOM, dtype=np.int64)
        self._counts = np.empty(_MIN_ROOM, dtype=np.float32)

    def catch_up(self, tokens: NDArray[np.int64]) -> None:
        """Count the new tokens of ``tokens``, which is the whole list. O(new tokens)."""
        for token in tokens[self.num_counted :].tolist():
            index = self._index_of.get(token)
            if index is None:
                index = self._add(token)
            self._counts[index] += 1
        self.num_counted = len(tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The distinct tokens: a view, valid until the next ``catch_up``."""
        return self._tokens[: len(self._index_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The count of each of ``tokens``: a view, valid as long."""
        return self._counts[: len(self._index_of)]

    def _add(self, token: int) -> int:
        index = self._index_of[token] = len(self._index_of)
        if index == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._tokens[index], self._counts[index] = token, 0.0
        return index


class RequestState:
    """One request. ``tokens[:num_tokens]`` are its prompt and what it has sampled so far."""

    __slots__ = (
        "_output_counts",
        "_seen_counts",
        "adapter_id",
        "changes_logits",
        "grammar",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_scores",
        "sampling",
        "slot",
        "token_rules",
        "tokens",
    )

    def __init__(self, request: NewRequest, slot: int, max_model_len: int) -> None:
        self.slot = slot
        self.adapter_id: AdapterId = request.adapter_id
        self.sampling: SamplingParams = request.sampling
        self.prompt_scores: dict[int, TokenLogprobs] = {}  # by position; if requested
        self.grammar: RowGrammar | None = None  # set for structured output
        self.token_rules = TokenRules.of(request.sampling)
        self.changes_logits = self.token_rules is not None or _changes_logits(request.sampling)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        longest = self.num_prompt_tokens + (request.sampling.max_tokens or max_model_len)
        # One more than the context: a step in flight may sample past a request's last token.
        self.tokens = np.zeros(min(longest, max_model_len) + 1, dtype=np.int64)
        self.tokens[: self.num_tokens] = request.prompt_token_ids
        self._seen_counts = TokenCounts()
        self._output_counts = TokenCounts()

    def cut(self, num_tokens: int) -> None:
        """Drop tokens behind ``num_tokens``: a row that is computed again samples again."""
        assert num_tokens <= self.num_tokens, "a row reaches beyond the known tokens"
        self.num_tokens = num_tokens
        # Rare, so all tokens are counted again.
        if num_tokens < self._seen_counts.num_counted:
            self._seen_counts = TokenCounts()
        if num_tokens - self.num_prompt_tokens < self._output_counts.num_counted:
            self._output_counts = TokenCounts()

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        if self.num_tokens < len(self.tokens):
            self.tokens[self.num_tokens] = token_id
            self.num_tokens += 1

    @property
    def room(self) -> int:
        """Tokens until its length limit."""
        return len(self.tokens) - 1 - self.num_tokens

    def seen_tokens(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and output."""
        self._seen_counts.catch_up(self.tokens[: self.num_tokens])
        return self._seen_counts.tokens

    @property
    def output(self) -> NDArray[np.int64]:
        """The tokens sampled so far."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    def output_counts(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct tokens sampled so far, and their counts."""
        counts = self._output_counts
        counts.catch_up(self.output)
        return counts.tokens, counts.counts


def _changes_logits(sampling: SamplingParams) -> bool:
    """Whether parameters other than the rules of tokens change logits before a draw."""
    return (
        sampling.structured_output is not None
        or sampling.min_tokens > 0
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class RequestTable:
    """All requests that plans have announced and not yet ended."""

    def __init__(self, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._max_model_len = max_model_len
        self._device = device
        self._states: dict[RequestId, RequestState] = {}
        num_columns = -(-max_model_len // block_size) + 1
        self.block_tables = BlockTables(np.zeros((_MIN_SLOTS, num_columns), np.int32), device)
        self._free_slots = list(range(_MIN_SLOTS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: RequestId) -> RequestState:
        return self._states[request_id]

    def get(self, request_id: RequestId) -> RequestState | None:
        """The request's state, or None if it is unknown."""
        return self._states.get(request_id)

    def add(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            if not self._free_slots:
                self._grow()
            slot = self._free_slots.pop()
            self._states[request.request_id] = RequestState(request, slot, self._max_model_len)

    def update_blocks(self, updates: Sequence[BlockUpdate]) -> None:
        for update in updates:
            slot = self._states[update.request_id].slot
            self.block_tables.write(slot, update.first_index, update.block_ids)

    def remove(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self._free_slots.append(state.slot)

    def _grow(self) -> None:
        host = self.block_tables.host
        self.block_tables = BlockTables(np.concatenate([host, np.zeros_like(host)]), self._device)
        self._free_slots.extend(range(2 * len(host) - 1, len(host) - 1, -1))
