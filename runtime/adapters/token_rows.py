"""The rows of tokens that an adapter has itself, in the embedding of tokens and the output head.

PEFT saves rows of some tokens (``trainable_token_indices``), and whole weights: those of
``modules_to_save``, and both after a change of the vocabulary. Of whole weights only the rows count
that differ from the base's. They are few if the vocabulary alone has changed.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .lora_spec import LoraSpec
from .resolved import FLOAT_BYTES, RawTensor, ResolvedAdapter, SavedWeight, TargetRows, TokenRows
from .target_map import Target, TargetMap
from .vocabulary import MAX_ADDED_TOKENS

_FORMS = ("", "modules_to_save", "original_module")  # of one weight: the first is used
_MAX_GAP_ROWS = 16  # between rows that are read together
_MAX_RUN_BYTES = 16 << 20

Spans = tuple[tuple[int, int], ...]  # of tokens: the first, and one past the last; ascending


class RowsResolver:
    """Collects the tensors of the embedding of tokens and of the output head beside LoRA."""

    def __init__(self, spec: LoraSpec, target_map: TargetMap, problems: list[str]) -> None:
        """``problems`` receives the reasons to refuse them."""
        self._spec = spec
        self._map = target_map
        self._problems = problems
        self._weights: dict[int, SavedWeight] = {}  # whole ones, by target
        self._forms: dict[int, str] = {}  # of these
        self._trained: dict[int, tuple[RawTensor, tuple[int, ...]]] = {}  # rows and their tokens
        self._targets = [one for one in target_map.targets if one.is_vocabulary]

    def add_weight(self, weight: SavedWeight, form: str) -> None:
        """Add the weight of a target; its number of rows may differ from the base's.

        ``form``: see ``BaseTensorName``. PEFT may save several of a module, of which it uses one.
        """
        assert weight.target is not None
        index = weight.target.index
        first = self._weights.get(index)
        if first is not None and form == self._forms[index]:
            self._problems.append(f"{weight.tensor.name}: the module already has {first.tensor.name}")
        elif first is None or _FORMS.index(form) < _FORMS.index(self._forms[index]):
            self._weights[index], self._forms[index] = weight, form

    def add_trained(self, target: Target, tensor: RawTensor, path: str) -> None:
        """Add the rows of some tokens; ``path``: of the module in training."""
        tokens = self._spec.trained_tokens(path, is_embedding=target.is_embedding)
        tied = self._tied_embedding(target) if target.is_head else None
        if tokens is None and tied is not None:  # saved for both
            tokens = self._spec.trained_tokens(tied.path, is_embedding=True)
        if tokens is None:
            self._problems.append(f"{tensor.name}: trainable_token_indices does not name it")
        elif tensor.shape != (len(tokens), target.row_features):
            self._problems.append(
                f"{tensor.name}: shape {list(tensor.shape)}, but the model and "
                f"trainable_token_indices need {[len(tokens), target.row_features]}"
            )
        elif tensor.dtype not in FLOAT_BYTES:
            served = ", ".join(FLOAT_BYTES)
            self._problems.append(f"{tensor.name}: type {tensor.dtype} is not served, only {served}")
        else:
            self._trained[target.index] = tensor, tokens

    def finish(self, is_scaled: Mapping[int, bool]) -> tuple[TargetRows, ...]:
        """Return the rows that are known without a comparison with the base.

        ``is_scaled``: by target with LoRA, whether it is DoRA.
        """
        self._check_announced()
        self._share_tied(is_scaled)
        if self._problems:
            return ()
        found = [
            self._rows_of(target, is_scaled.get(target.index))
            for target in self._targets
            if target.index in self._weights or target.index in self._trained
        ]
        for rows in found:
            self._check(rows)
        self._check_sizes({rows.target.index: rows.num_tokens for rows in found})
        return tuple(found)

    @property
    def weights(self) -> tuple[SavedWeight, ...]:
        """The whole weights, once ``finish`` has been called."""
        return tuple(self._weights[index] for index in sorted(self._weights))

    def _check_announced(self) -> None:
        """Check that the rows of all tokens that the configuration names are in the file."""
        for target in self._targets:
            is_tied = target.is_head and self._tied_embedding(target) is not None
            tokens = self._spec.trained_tokens(target.path, is_embedding=target.is_embedding)
            if tokens is not None and not is_tied and target.index not in self._trained:
                self._problems.append(
                    f"{target.path}: trainable_token_indices names it, but the file has no rows for it"
                )

    def _tied_embedding(self, head: Target) -> Target | None:
        """The embedding that the head shares its weight with."""
        shared = self._map.vocabularies[head.path].shared_with
        return next((one for one in self._targets if one.path == shared), None)

    def _share_tied(self, with_lora: Container[int]) -> None:
        """Give a tied head the rows of the embedding, where PEFT does."""
        for head in self._targets:
            embedding = self._tied_embedding(head) if head.is_head else None
            if embedding is None:
                continue
            if self._spec.ensure_weight_tying and (head.index in with_lora or embedding.index in with_lora):
                self._problems.append(
                    f"{embedding.path}: LoRA on a tied embedding with ensure_weight_tying is not served"
                )
            trained = self._trained.get(embedding.index)
            if trained is not None and head.index not in self._trained:
                own = self._spec.trained_tokens(head.path, is_embedding=False)
                if own is None or own == trained[1]:
                    self._trained[head.index] = trained
                else:
                    self._problems.append(
                        f"{head.path}: trainable_token_indices names it, but the file has no rows for it"
                    )
            for one, other in ((embedding, head), (head, embedding)):
                weight = self._weights.get(one.index)
                # PEFT reads other weights than those of modules_to_save into the base's own.
                is_shared = not self._spec.saves(one.path) or self._spec.ensure_weight_tying
                if weight is not None and is_shared:
                    self._weights.setdefault(other.index, replace(weight, target=other))

    def _rows_of(self, target: Target, is_scaled: bool | None) -> TargetRows:
        tensor, tokens = self._trained.get(target.index, (None, ()))
        runs = () if tensor is None else _runs_of_tokens(tensor, tokens, target)
        weight = self._weights.get(target.index)
        num_tokens = max([target.num_tokens, *(run.end for run in runs)])
        if weight is not None:
            num_tokens = weight.tensor.shape[0]
        reason = ""
        if target.is_head and "bias" in self._map.vocabularies[target.path].shapes:
            reason = "trained rows of an output head with a bias are not served"
        elif is_scaled:
            reason = "DoRA beside trained rows of the same module is not served"
        elif is_scaled is not None and num_tokens != target.num_tokens:
            reason = "LoRA on a vocabulary of another size is not served"
        rows = TargetRows(target, num_tokens, runs, reason and f"{target.path}: {reason}")
        if weight is None:
            return rows
        beyond = np.arange(num_tokens) >= target.num_tokens
        return _with_spans(rows, weight.tensor, spans_beside(rows, beyond))

    def _check(self, rows: TargetRows) -> None:
        target, size = rows.target, rows.target.num_tokens
        added, largest = rows.num_tokens - size, max((run.end for run in rows.runs), default=0)
        num_own = sum(max(0, run.end - max(run.first, size)) for run in rows.runs)
        if largest > rows.num_tokens:
            reason = (
                f"trainable_token_indices has token {largest - 1}, the file's vocabulary has "
                f"{rows.num_tokens} tokens"
            )
        elif added > MAX_ADDED_TOKENS:
            reason = (
                f"a vocabulary of {rows.num_tokens} tokens has {added} more than the base's; at "
                f"most {MAX_ADDED_TOKENS} more are served"
            )
        elif num_own < added:
            reason = (
                f"the file lacks the rows of some of the tokens {size} to {rows.num_tokens - 1}, "
                "which the base has not"
            )
        elif added > 0 and (other := self._other_embedding()) is not None:
            reason = f"tokens beyond the base's are not served: {other} may lack them"
        elif rows.changes_base and rows.refusal:
            self._problems.append(rows.refusal)
            return
        else:
            return
        self._problems.append(f"{target.path}: {reason}")

    def _other_embedding(self) -> str | None:
        """The path of an embedding beside that of tokens, e.g. one of tokens for each layer."""
        own = {one.path for one in self._targets}
        return next((path for path in self._map.vocabularies if path not in own), None)

    def _check_sizes(self, found: Mapping[int, int]) -> None:
        sizes = {one.path: found.get(one.index, one.num_tokens) for one in self._targets}
        is_changed = any(sizes[one.path] != one.num_tokens for one in self._targets)
        if is_changed and len(set(sizes.values())) > 1:
            shown = ", ".join(f"{path} has {size}" for path, size in sizes.items())
            self._problems.append(f"the adapter's vocabularies differ in size: {shown} tokens")


def with_kept(adapter: ResolvedAdapter, kept: Mapping[str, Spans]) -> ResolvedAdapter:
    """Return ``adapter`` with more rows of its saved weights; ``kept``: by path of the target."""
    if not kept:
        return adapter
    weights = {one.target.index: one.tensor for one in adapter.saved if one.target is not None}
    rows = tuple(
        _with_spans(one, weights[one.target.index], kept[one.target.path]) if one.target.path in kept else one
        for one in adapter.rows
    )
    return replace(adapter, rows=rows)


def spans_beside(rows: TargetRows, wanted: NDArray[np.bool_]) -> Spans:
    """Return the tokens that are ``wanted`` and not in ``rows``, with few others between them."""
    is_free = np.ones(len(wanted), np.bool_)
    for run in rows.runs:
        is_free[run.first : run.end] = False
    changes = np.diff((wanted & is_free).astype(np.int8), prepend=0, append=0)
    spans: list[tuple[int, int]] = []
    for first, end in zip(
        np.flatnonzero(changes > 0).tolist(), np.flatnonzero(changes < 0).tolist(), strict=True
    ):
        before = spans[-1][1] if spans else first
        if spans and first - before <= _MAX_GAP_ROWS and is_free[before:first].all():
            spans[-1] = spans[-1][0], end
        else:
            spans.append((first, end))
    return tuple(spans)


def _with_spans(rows: TargetRows, weight: RawTensor, spans: Sequence[tuple[int, int]]) -> TargetRows:
    """Add the rows of some tokens from a whole weight, in parts of a limited size."""
    step = max(1, _MAX_RUN_BYTES // max(1, weight.num_bytes // weight.shape[0]))
    runs = [
        _run(weight, start, min(start + step, end), start, rows.target)
        for first, end in spans
        for start in range(first, end, step)
    ]
    return replace(rows, runs=tuple(sorted((*rows.runs, *runs), key=lambda run: run.first)))


def _runs_of_tokens(tensor: RawTensor, tokens: Sequence[int], target: Target) -> tuple[TokenRows, ...]:
    """One run for each sequence of consecutive tokens; ``tokens``: of the rows of ``tensor``."""
    starts = [at for at, one in enumerate(tokens) if at == 0 or tokens[at - 1] + 1 != one]
    runs = [
        _run(tensor, start, end, tokens[start], target)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]
    return tuple(sorted(runs, key=lambda run: run.first))


def _run(tensor: RawTensor, first: int, end: int, token: int, target: Target) -> TokenRows:
    # The head may have the same rows as the embedding.
    name = f"{tensor.name}, rows {first} to {end - 1} for {target.path}"
    return TokenRows(token, tensor.rows(first, end, name))
