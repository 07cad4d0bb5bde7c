"""KV without values: the inputs of every position in a block, on the device and on the host.

Inputs are the namespace, all tokens up to the position, and whether the rotary embedding was the
long one. They do not depend on the request, so shared blocks pass only if contents are equal. No
request writes to a block of another one, and a copy moves contents at its end.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field

from corun.profiles.link import Direction
from corun.runtime.plan import BlockId, HostSlot, KvTransfer, RequestId, TransferId

# Namespace, interned prefix, long embedding; None = garbage, as in memory that was never written.
_Content = tuple[Hashable, int, bool] | None


@dataclass(eq=False)
class KvSequence:
    """The tokens of a request that is known to the device, and the blocks they are in."""

    namespace: Hashable
    prefix_ids: list[int]  # of all tokens up to each position
    block_table: list[BlockId] = field(default_factory=list)


@dataclass(frozen=True)
class KvRow:
    """A row of a step: it reads all of its blocks and writes to the last ones."""

    request_id: RequestId
    start: int
    num_tokens: int
    block_ids: tuple[BlockId, ...]
    written_block_ids: tuple[BlockId, ...]


class FakeKv:
    """All KV of a device and of the host. Rows in flight are the executor's, and passed in."""

    def __init__(self, *, num_blocks: int, block_size: int, long_from_tokens: int | None = None) -> None:
        """``long_from_tokens``: of requests with so many tokens the embedding is the long one."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.long_from_tokens = long_from_tokens
        self.is_live: Callable[[RequestId], bool] = lambda request_id: True  # its table counts
        self.copies: dict[TransferId, KvTransfer] = {}  # in flight
        self._sequences: dict[RequestId, KvSequence] = {}
        self._prefix_ids: dict[tuple[int, int], int] = {}
        self._blocks: dict[BlockId, list[_Content]] = {}  # not in it: all garbage
        self._slots: dict[HostSlot, list[_Content]] = {}

    # Commands to the device.

    def announce(self, request_id: RequestId, namespace: Hashable, token_ids: Iterable[int]) -> KvSequence:
        sequence = self._sequences[request_id] = KvSequence(namespace, [])
        for token_id in token_ids:
            self.append(sequence, token_id)
        return sequence

    def forget(self, request_id: RequestId) -> None:
        """Remove a request that has ended; its blocks keep their contents."""
        self._sequences.pop(request_id, None)

    def append(self, sequence: KvSequence, token_id: int) -> None:
        """A sequence has one more token."""
        before = sequence.prefix_ids[-1] if sequence.prefix_ids else 0
        prefix_id = self._prefix_ids.setdefault((before, token_id), len(self._prefix_ids) + 1)
        sequence.prefix_ids.append(prefix_id)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Give the memory of blocks back to the machine."""
        for block_id in block_ids:
            self._blocks.pop(block_id, None)

    def keep_slots(self, is_kept: Callable[[HostSlot], bool]) -> None:
        """Give the memory of all other slots back to the machine."""
        self._slots = {slot: contents for slot, contents in self._slots.items() if is_kept(slot)}

    def begin(self, copy: KvTransfer) -> None:
        """Begin a copy; until its end its destination contains garbage."""
        assert len(copy.block_ids) == len(copy.host_slots) > 0
        assert len(set(copy.block_ids)) == len(set(copy.host_slots)) == len(copy.block_ids)
        assert all(0 <= block_id < self.num_blocks for block_id in copy.block_ids)
        assert copy.transfer_id not in self.copies
        self._check_copy(copy)
        self.copies[copy.transfer_id] = copy
        self._spoil_target(copy)

    def finish(self, copy: KvTransfer, error: str | None) -> None:
        """End a copy, which has moved its contents if ``error`` is None."""
        del self.copies[copy.transfer_id]
        if error is not None:
            return
        for block_id, slot in zip(copy.block_ids, copy.host_slots, strict=True):
            if copy.direction is Direction.TO_HOST:
                self._slots[slot] = list(self._contents(block_id))
            else:
                self._blocks[block_id] = list(self._slots.get(slot, self._garbage()))

    # Rows.

    def compute(self, row: KvRow) -> None:
        """Check everything that the row's attention reads, and write its KV."""
        sequence = self._sequences[row.request_id]
        num_tokens = len(sequence.prefix_ids)
        is_long = self.long_from_tokens is not None and num_tokens >= self.long_from_tokens
        for position in range(row.start + row.num_tokens):
            content = (sequence.namespace, sequence.prefix_ids[position], is_long)
            index, offset = divmod(position, self.block_size)
            block_id = row.block_ids[index]
            if position >= row.start:
                self._contents(block_id)[offset] = content
            found = self._contents(block_id)[offset]
            assert found == content, (
                f"foreign, stale or missing KV: {found} instead of {content} "
                f"at {position} of request {row.request_id}, in block {block_id}"
            )

    def spoil(self, row: KvRow) -> None:
        """Write contents that must never be read, as the row is void."""
        for position in range(row.start, row.start + row.num_tokens):
            index, offset = divmod(position, self.block_size)
            self._contents(row.block_ids[index])[offset] = None

    # Checks.

    def check_handed_out(
        self, request_id: RequestId, first_index: int, block_ids: Collection[BlockId], rows: Collection[KvRow]
    ) -> None:
        """Check that blocks in use enter another table only with equal contents.

        To be called when the tables are those of the whole plan, before its rows.
        """
        sequence = self._sequences[request_id]
        assert max(Counter(sequence.block_table).values(), default=1) == 1, "twice in a table"
        for index, block_id in enumerate(block_ids, start=first_index):
            assert 0 <= block_id < self.num_blocks
            in_use_by = [row for row in rows if block_id in row.block_ids]
            assert all(row.request_id != request_id for row in in_use_by), "in use by a step"
            if in_use_by:
                assert self._holds(block_id, sequence, index), "in use by a step"
            if self._other_holders(block_id, request_id):
                assert self._holds(block_id, sequence, index), "a block goes to two requests"
            if block_id in self.copied_blocks():
                assert self._holds(block_id, sequence, index), "in use by a copy"

    def check_use(self, rows: Collection[KvRow], freed_blocks: Collection[BlockId] = ()) -> None:
        """Check that no block in use is written or copied to by another request, or given back.

        ``rows``: all in flight. To be called when a plan has been taken in.
        """
        self._check_written(rows)
        used = {block_id for row in rows for block_id in row.block_ids}
        written = {block_id for row in rows for block_id in row.written_block_ids}
        for copy in self.copies.values():
            if copy.direction is Direction.TO_HOST:
                assert written.isdisjoint(copy.block_ids), "written to while it is copied"
            else:
                assert used.isdisjoint(copy.block_ids), "in use before its copy has ended"
        for block_id in freed_blocks:
            assert block_id not in used, "freed while a step uses it"
            assert block_id not in self.copied_blocks(), "freed while it is copied"
            assert not self._other_holders(block_id), "freed while a request has it"

    def copied_blocks(self) -> set[BlockId]:
        """Blocks that copies in flight read or write."""
        return {block_id for copy in self.copies.values() for block_id in copy.block_ids}

    def _check_written(self, rows: Collection[KvRow]) -> None:
        writer: dict[BlockId, RequestId] = {}
        for row in rows:
            for block_id in row.written_block_ids:
                assert writer.setdefault(block_id, row.request_id) == row.request_id, (
                    f"two requests write to block {block_id}"
                )
        for row in rows:
            for block_id in row.block_ids:
                assert writer.get(block_id, row.request_id) == row.request_id, (
                    f"written to while a step uses it: block {block_id}"
                )
        for block_id, request_id in writer.items():
            holders = self._other_holders(block_id, request_id)
            assert not holders, f"{request_id} writes to block {block_id}, which {holders} have"

    def _check_copy(self, copy: KvTransfer) -> None:
        """Check that concurrent copies share only blocks that both read."""
        is_to_host = copy.direction is Direction.TO_HOST
        for other in self.copies.values():
            has_slots_to_read = not is_to_host and other.direction is Direction.TO_DEVICE
            if not has_slots_to_read:
                assert set(copy.host_slots).isdisjoint(other.host_slots), "two copies in one slot"
            has_blocks_to_read = is_to_host and other.direction is Direction.TO_HOST
            if not has_blocks_to_read:
                assert set(copy.block_ids).isdisjoint(other.block_ids), "two copies of one block"

    def _other_holders(self, block_id: BlockId, request_id: RequestId | None = None) -> list[RequestId]:
        """Other requests with the block in their tables that do not get another table."""
        return [
            other
            for other, sequence in self._sequences.items()
            if other != request_id and block_id in sequence.block_table and self.is_live(other)
        ]

    def _holds(self, block_id: BlockId, sequence: KvSequence, index: int) -> bool:
        """Whether a block is, or will be when its copy has ended, what stands there in a table.

        Of either embedding: which one it must be is known when it is read.
        """
        contents = self._blocks.get(block_id, self._garbage())
        for copy in self.copies.values():
            if copy.direction is Direction.TO_DEVICE and block_id in copy.block_ids:
                slot = copy.host_slots[copy.block_ids.index(block_id)]
                contents = self._slots.get(slot, self._garbage())
        first = index * self.block_size
        wanted = sequence.prefix_ids[first : first + self.block_size]
        return [content and content[:2] for content in contents] == [
            (sequence.namespace, prefix_id) for prefix_id in wanted
        ]

    # Contents.

    def _garbage(self) -> list[_Content]:
        return [None] * self.block_size

    def _contents(self, block_id: BlockId) -> list[_Content]:
        return self._blocks.setdefault(block_id, self._garbage())

    def _spoil_target(self, copy: KvTransfer) -> None:
        if copy.direction is Direction.TO_HOST:
            self._slots |= {slot: self._garbage() for slot in copy.host_slots}
        else:
            self._blocks |= {block_id: self._garbage() for block_id in copy.block_ids}
