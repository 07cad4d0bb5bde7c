"""Is finding a prefix cheap beside a step? Microseconds of calls of the tree of KV blocks.

A tree of 65,000 blocks of 16 tokens, of sessions that share prefixes. A request of 4,096 tokens is
matched, inserted, released and evicted, copied to the host and removed. A call is for the whole
request: all of its 256 blocks. The last line is JSON.

    python bench/kv_tree.py [--rounds 200]
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from corun.runtime.memory.kv_tree import KvNode, KvTree
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.plan import BlockId, HostSlot
from paired import report

_NUM_BLOCKS = 65_000
_BLOCK_TOKENS = 16
_REQUEST_TOKENS = 4096
_NUM_NAMESPACES = 32
_VOCABULARY = 128_000
MAX_MATCH_AND_ENTER_US = 500.0

_Result = TypeVar("_Result")
_Prompt = tuple[bytes, tuple[int, ...]]  # namespace and tokens


class Bench:
    """A tree that is full, and how long its operations took."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.tree = KvTree(_BLOCK_TOKENS, 2**20, LruPolicy())
        self.times_us: dict[str, list[float]] = defaultdict(list)
        self.num_entered = 0
        self.prompts: list[_Prompt] = []
        while self.tree.num_nodes < _NUM_BLOCKS - _REQUEST_TOKENS // _BLOCK_TOKENS:
            self.fill()

    def fill(self) -> None:
        """Let one more request leave its blocks, which goes on where another one was."""
        namespace, known = self.namespace(), tuple[int, ...]()
        if self.prompts and self.rng.random() < 0.5:
            namespace, known = self.rng.choice(self.prompts)
            num_shared = self.rng.randrange(len(known) // _BLOCK_TOKENS + 1) * _BLOCK_TOKENS
            known = known[:num_shared]
        token_ids = known + self.tokens(_REQUEST_TOKENS - len(known))
        path = self.tree.match(namespace, token_ids, _REQUEST_TOKENS)
        if path:
            self.tree.hold(path[-1])
        self.tree.release(self.enter(namespace, token_ids, path))
        self.prompts.append((namespace, token_ids))

    def namespace(self) -> bytes:
        return bytes([self.rng.randrange(_NUM_NAMESPACES)]) * 32

    def tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(_VOCABULARY) for _ in range(number))

    def enter(self, namespace: bytes, token_ids: tuple[int, ...], path: Sequence[KvNode] = ()) -> KvNode:
        """Add the blocks behind ``path``, which ends with a held block; return the last, held."""
        node = path[-1] if path else None
        for start in range(len(path) * _BLOCK_TOKENS, len(token_ids), _BLOCK_TOKENS):
            block = token_ids[start : start + _BLOCK_TOKENS]
            node = self.tree.insert(namespace, node, block, BlockId(self.num_entered))
            self.num_entered += 1
        assert node is not None
        return node

    def timed(self, name: str, operation: Callable[[], _Result]) -> _Result:
        began_s = time.perf_counter()
        result = operation()
        self.times_us[name].append((time.perf_counter() - began_s) * 1e6)
        return result

    def round(self) -> None:
        """One request that is there, and one that is new."""
        tree = self.tree
        namespace, token_ids = self.rng.choice(self.prompts)
        known = tuple([*token_ids])  # another object, as another request has it
        path = self.timed("match", lambda: tree.match(namespace, known, _REQUEST_TOKENS))
        assert len(path) == _REQUEST_TOKENS // _BLOCK_TOKENS
        self.timed("hold", lambda: tree.hold(path[-1]))
        self.timed("release", lambda: tree.release(path[-1]))
        tree.release(self.timed("enter what is there", lambda: self.enter(namespace, known)))
        other, new = self.namespace(), self.tokens(_REQUEST_TOKENS)
        missed = self.timed("match nothing", lambda: tree.match(other, new, _REQUEST_TOKENS))
        assert not missed
        tree.release(self.timed("enter", lambda: self.enter(other, new)))
        entered = tree.match(other, new, _REQUEST_TOKENS)
        self.timed("copied to the host", lambda: self.copy_all(entered))
        self.timed("host copies given up", lambda: [tree.clear_host_slot(n) for n in entered])
        self.timed("evict", lambda: [tree.evict(node) for node in reversed(entered)])

    def copy_all(self, path: Sequence[KvNode]) -> None:
        for number, node in enumerate(path):
            self.tree.set_host_slot(node, HostSlot(number))

    def end(self) -> None:
        """What takes as long as there are blocks: whole namespaces, and a prefix that is lost."""
        tree = self.tree
        namespace, token_ids = self.prompts[0]
        self.timed("rank a namespace", lambda: tree.unreferenced(namespace))
        first = tree.match(namespace, token_ids, _BLOCK_TOKENS)[0]
        self.timed("drop a prefix", lambda: tree.drop_content(first))
        self.timed("drop a namespace", lambda: tree.drop_namespace(namespace))


def main() -> None:
    """Measure, print a line per operation, and the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=200, help="requests of each kind")
    options = parser.parse_args()
    bench = Bench()
    for _ in range(options.rounds):
        bench.round()
    bench.end()
    medians = {name: round(statistics.median(t), 1) for name, t in bench.times_us.items()}
    for name, median_us in medians.items():
        print(f"{name:22s} {median_us:9.1f} us")
    both_us = medians["match"] + medians["enter"]
    report(
        "kv_tree",
        {"blocks": bench.tree.num_nodes, "tokens": _REQUEST_TOKENS, "rounds": options.rounds},
        {"median_us": medians, "match_and_enter_us": round(both_us, 1)},
        {"match and enter": both_us <= MAX_MATCH_AND_ENTER_US},
    )


if __name__ == "__main__":
    main()
