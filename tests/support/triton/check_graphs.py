"""Replays padded decode passes in a process of its own, in Triton's interpreter or on a GPU.

The interpreter has no capture: the same modules run again, on the tensors of the captured pass and
with its grids and lengths, as a graph's kernels would. Arguments: a model's directory, the device.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.decode_passes import DecodePasses

_MAX_DIFFERENCE = {"cpu": 1e-5, "cuda": 1e-3}  # of the largest logit, in float32

# Requests of each pass. Two kinds, with one piece of an adapter's rows and with more, are met,
# captured, verified and replayed, with fewer rows and pieces than before and with more.
_PASSES = (
    (0, 1, 3),
    (1, 2, 5),
    (2, 0, 4),
    (3, 5, 0, 1),
    (5, 2, 0, 4),
    (1, 4, 2),
    (1, 4, 0),
    (2, 0, 5, 3),
    (0, 1, 5),
)


def main(directory: str, device: str) -> None:
    """Compare two copies of a model, one of which replays, over passes of changing rows."""
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    record = None
    if device == "cpu":
        options |= {"attention_backend": "triton", "lora_backend": "torch", "linear_backend": "plain"}
        record = _Again()
    replaying = DecodePasses(Path(directory), record=record, **options)
    plain = DecodePasses(Path(directory), decode_graphs="off", **options)
    both = (replaying, plain)
    for passes in both:
        rows = [
            passes.add_adapter(8, every=5, is_inside=True),
            passes.add_adapter(12, every=4, is_inside=True),
        ]
        table_rows = (-1, rows[0], rows[1], rows[0], -1, rows[1])
        requests = [
            passes.start(number, row, {-1: 0, rows[0]: 8, rows[1]: 12}[row])
            for number, row in enumerate(table_rows)
        ]
        passes.requests = requests
    for numbers in _PASSES:
        _compare(both, numbers, device)
    for passes in both:  # another adapter takes a row
        passes.loaded.lora_table.remove(rows[0])
        assert passes.add_adapter(9, every=6, is_inside=True) == rows[0]
        for number in (1, 3):
            passes.requests[number].rank = 9
    for numbers in _PASSES[:2]:
        _compare(both, numbers, device)
    graphs = replaying.runner.graphs
    assert graphs is not None and graphs.num_verified == 2, graphs
    _compare_pools(both, device)


class _Again:
    """Stands in for a capture: the modules run again."""

    def has_room(self) -> bool:
        return True

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """See ``Recorder``."""

        def replay() -> None:
            run()

        return replay


def _compare(both: tuple[DecodePasses, ...], numbers: tuple[int, ...], device: str) -> None:
    logits = [passes.decode([passes.requests[number] for number in numbers]) for passes in both]
    assert logits[0].shape == logits[1].shape
    largest = logits[1].abs().max()
    difference = float((logits[0] - logits[1]).abs().max() / largest)
    assert difference <= _MAX_DIFFERENCE[device], (numbers, difference)


def _compare_pools(both: tuple[DecodePasses, ...], device: str) -> None:
    """Rows that pad a pass write nothing."""
    for layer in range(both[0].loaded.config.num_hidden_layers):
        pools = [passes.runner.pool.layer(layer) for passes in both]
        for ours, theirs in zip(*pools, strict=True):
            assert torch.allclose(ours, theirs, atol=_MAX_DIFFERENCE[device], rtol=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
