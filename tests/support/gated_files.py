"""Adapter files with gates: a test controls the reading of each tensor."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from unittest import mock

from corun.runtime.adapters.digest import ContentDigest
from corun.runtime.adapters.load import OpenAdapter, open_adapter
from corun.runtime.adapters.lora_spec import LoraSpec
from corun.runtime.adapters.resolved import (
    AdapterReader,
    FileHeader,
    ResolvedAdapter,
    StoredTensor,
    TakeTensors,
)
from corun.runtime.engine.assembly import adapter_wiring

TIMEOUT_S = 30.0


class FileGate:
    """While it is closed, each tensor that a load reads needs a permit."""

    def __init__(self, *, holds_registrations: bool = False) -> None:
        """``holds_registrations``: reading outside of loads needs permits, too."""
        self.num_taken = 0  # tensors
        self.holds_registrations = holds_registrations
        self._is_open = True
        self._passes = threading.Semaphore(0)

    def close(self) -> None:
        while self._passes.acquire(blocking=False):
            pass
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def let(self, num_tensors: int) -> None:
        self._passes.release(num_tensors)

    def wrap(self, source: OpenAdapter) -> AdapterReader:
        """The tensors of ``source``, read when the gate permits."""
        return _GatedReader(source, self)

    @contextmanager
    def before_files(self) -> Iterator[None]:
        """Gate the files of engines that are built and run inside."""
        with mock.patch.object(
            adapter_wiring, "open_adapter", lambda *a, **b: self.wrap(open_adapter(*a, **b))
        ):
            yield

    def take(self) -> None:
        """Wait until one more tensor may be taken."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._is_open and not self._passes.acquire(timeout=0.001):
            assert time.monotonic() < deadline_s, "a tensor was never let go"
        self.num_taken += 1


class FolderGate(FileGate):
    """A gate that one process controls and another one passes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(holds_registrations=True)
        self._bar = folder / "bar"
        self._passes_folder = folder / "passes"
        self._passes_folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def close(self) -> None:
        while self._use_pass():
            pass
        self._bar.touch()

    def open(self) -> None:
        self._bar.unlink(missing_ok=True)

    def let(self, num_tensors: int) -> None:
        for number in itertools.islice(self._numbers, num_tensors):
            (self._passes_folder / str(number)).touch()

    def take(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._bar.exists() and not self._use_pass():
            assert time.monotonic() < deadline_s, "it was never let go"
            time.sleep(0.002)
        self.num_taken += 1

    def _use_pass(self) -> bool:
        for path in self._passes_folder.iterdir():
            with suppress(FileNotFoundError):
                path.unlink()
                return True
        return False


class _GatedReader:
    def __init__(self, source: OpenAdapter, gate: FileGate) -> None:
        self._source = source
        self._gate = gate
        self._is_held = gate.holds_registrations

    @property
    def spec(self) -> LoraSpec:
        return self._source.spec

    @property
    def outline(self) -> ResolvedAdapter:
        return self._source.outline

    @property
    def adapter(self) -> ResolvedAdapter:
        return self._source.adapter

    @property
    def digest(self) -> ContentDigest:
        return self._source.digest

    def expect(self, digest: ContentDigest) -> None:
        self._is_held = True
        self._source.expect(digest)

    def begin(self) -> FileHeader | None:
        return self._source.begin()

    def resume(self, header: FileHeader) -> None:
        self._is_held = True
        self._source.resume(header)

    def read_layers(self, take: TakeTensors) -> Iterator[int]:
        def take_when_let(tensors: Sequence[StoredTensor]) -> None:
            for one in tensors:
                self._gate.take()
                take([one])

        return self._source.read_layers(take_when_let if self._is_held else take)

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
