"""Finds up to how many tokens packed rows are exact, beyond the reach of the parity probe.

Windows and other thresholds lie thousands of tokens away. A small random copy of the same class,
with thresholds at a few dozen tokens, shows their effect in float32: packed rows agree with plain
transformers beyond all of them, or below one of them, or never.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from ... import __version__ as corun_version
from ...cpu_workers.affinity import limit_torch_threads
from ...runtime.kept_records import read_record, write_record
from ..attention.torch_backend import TorchAttention
from ..forward.batch import StepContext
from ..model.attention_hook import PagedAttentionHook
from ..model.fingerprint import code_files
from ..model.kv_pool import KvLayout, KvPool
from ..model.plain_logits import Comparison, PlainLogits
from ..model.probe import MAX_PROBE_TOKENS, ProbeRow, layer_shapes, record_attention
from ..model.rope import guard_longrope, rope_max_length
from ..model.small_copy import SmallCopy, make_small_copy
from .runner import ModelRunner

_METHOD = 1  # increased when the method changes, so that older verdicts do not count
_BLOCK_SIZE = 8
_TOKENS_BEYOND = 17  # beyond the last threshold
_TOKENS_AT_END = 24  # the last tokens, in small pieces
_PIECES = (1, 5, 1, 9, 2)


@dataclass(frozen=True, slots=True)
class ThresholdVerdict:
    """The result for the thresholds of a model."""

    outcome: str = "right"  # or limited, wrong, untried
    num_tokens: int | None = None  # limit of a request and of a step, if outcome is limited
    reason: str = ""  # for logs: the limiting thresholds, or the error


def judge_thresholds(model: PreTrainedModel, max_tokens: int, directory: Path | None) -> ThresholdVerdict:
    """Test the thresholds of ``model`` up to ``max_tokens`` tokens, or read an earlier verdict.

    ``directory``: of verdicts, by what they depend on; None = none. If a verdict cannot be read or
    written, every start tests again.
    """
    path = None if directory is None else directory / f"{_digest(model, max_tokens)}.json"
    verdict = None if path is None else read_record(path, ThresholdVerdict)
    if verdict is None:
        verdict = _judge(model, max_tokens)
        if path is not None:
            write_record(path, verdict, "the next start tries the model's thresholds again")
    return verdict


def _judge(model: PreTrainedModel, max_tokens: int) -> ThresholdVerdict:
    # More OpenMP threads would wait for one another, and ``torch.set_num_threads`` would also
    # change the user's process.
    with ThreadPoolExecutor(1, initializer=limit_torch_threads) as pool:
        return pool.submit(_judge_in_thread, model, max_tokens).result()


def _judge_in_thread(model: PreTrainedModel, max_tokens: int) -> ThresholdVerdict:
    try:
        small = make_small_copy(model, MAX_PROBE_TOKENS + 1, max_tokens)
        return ThresholdVerdict() if small is None else _judge_copy(small)
    except Exception as error:  # code of the model with sizes that it was not made for
        return ThresholdVerdict("untried", reason=f"{type(error).__name__}: {error}")


def _judge_copy(small: SmallCopy) -> ThresholdVerdict:
    with closing(_Trial(small)) as trial:
        worst = trial.run(None)
        if worst.is_within:
            return ThresholdVerdict()
        for threshold in reversed(small.thresholds):
            worst = trial.run(threshold.copy_value - 1)
            if worst.is_within:
                reason = f"{' and '.join(threshold.names)} = {threshold.value}"
                return ThresholdVerdict("limited", threshold.value - 1, reason)
    names = ", ".join(name for threshold in small.thresholds for name in threshold.names)
    return ThresholdVerdict(
        "wrong",
        reason=f"relative error {worst.error:.2g}, limit {worst.limit:.2g}, in a small copy "
        f"with small {names}",
    )


def _digest(model: PreTrainedModel, max_tokens: int) -> str:
    """Digest of all that a verdict depends on: configuration, code of the model, versions."""
    digest = hashlib.sha256()
    config = {**model.config.to_dict(), "_name_or_path": ""}
    versions = (_METHOD, corun_version, transformers.__version__, str(torch.__version__))
    digest.update(repr((versions, max_tokens, sorted(config.items(), key=str))).encode())
    for file in code_files(model):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _Trial:
    """A copy that is ready to run, packed and plainly."""

    def __init__(self, small: SmallCopy) -> None:
        self._model = model = small.model
        self._last_threshold = small.thresholds[-1].copy_value
        self._context = StepContext()
        self._hook = PagedAttentionHook(self._context)
        model.set_attn_implementation(self._hook.name)
        guard_longrope(model, self._context)
        try:
            record = record_attention(model, self._hook)
        except BaseException:
            self._hook.close()
            raise
        self._layout = KvLayout(layer_shapes(record), _BLOCK_SIZE, torch.float32)
        limits = [record.max_chunk_len, rope_max_length(model)]
        self._max_len = min((limit for limit in limits if limit is not None), default=None)

    def close(self) -> None:
        self._hook.close()

    def run(self, limit: int | None) -> Comparison:
        """The worst position with at most ``limit`` tokens in each request and each step."""
        sequences = self._sequences(limit)
        num_columns = -(-max(map(len, sequences)) // _BLOCK_SIZE)
        pool = KvPool(self._layout, num_columns * len(sequences), self._model.device)
        self._hook.attach(TorchAttention(), pool)
        runner = ModelRunner(self._model, self._context, pool)
        try:
            truth = PlainLogits(self._model, self._hook, sequences)
            found = []
            for first in (limit or self._last_threshold * 2, _PIECES[-2]):
                for rows in _steps(sequences, first, limit):
                    for row, logits in zip(rows, runner.probe_step(rows, len(sequences)), strict=True):
                        last = row.start + len(row.token_ids) - 1
                        found.append(truth.compare(row.sequence, last, logits))
            return max(found, key=lambda one: one.share)
        finally:
            runner.close()

    def _sequences(self, limit: int | None) -> list[tuple[int, ...]]:
        """Sequences beyond the last threshold, and beyond each other one if long enough."""
        beyond = self._last_threshold + _TOKENS_BEYOND
        longest = min(one for one in (beyond, limit, self._max_len) if one is not None)
        num = 2 if limit is not None else -(-2 * beyond // longest)
        generator = torch.Generator().manual_seed(21)
        vocab_size = self._model.config.get_text_config().vocab_size
        lengths = [max(1, longest - i % 4) for i in range(num)]
        return [tuple(torch.randint(vocab_size, (n,), generator=generator).tolist()) for n in lengths]


def _steps(sequences: Sequence[tuple[int, ...]], first: int, limit: int | None) -> Iterator[list[ProbeRow]]:
    """Chunks of all sequences: ``first`` tokens, but for the end of each, then small pieces.

    No step has more than ``limit`` tokens.
    """
    done = [0] * len(sequences)
    num_steps = 0
    while any(start < len(one) for start, one in zip(done, sequences, strict=True)):
        rows: list[ProbeRow] = []
        room = limit or sum(map(len, sequences))
        for number, sequence in enumerate(sequences):
            size = _PIECES[(num_steps + number) % len(_PIECES)]
            if done[number] == 0:
                at_end = min(_TOKENS_AT_END, len(sequence) // 3) + number % 3
                size = max(1, min(first, len(sequence) - at_end))
            start = done[number]
            tokens = sequence[start : start + min(size, room)]
            if tokens:
                rows.append(ProbeRow(number, start, tokens, known_len=len(sequence)))
                done[number] += len(tokens)
                room -= len(tokens)
        yield rows
        num_steps += 1
