"""Words between threads and processes: order, spins that end, and the generated code."""

import platform
import threading
import time
from collections.abc import Iterator

import llvmlite.binding
import numba
import numpy as np
import pytest
from corun.shm import atomics
from corun.shm.atomics import (
    load_acquire,
    load_acquire_64,
    monotonic_ns,
    pause,
    spin_until,
    store_release,
    store_release_64,
)
from corun.shm.segment import Segment
from corun.shm.words import wrap
from llvmlite import ir
from support.processes import DEADLINE_S, finish, line_of, program

_LONG_NS = int(DEADLINE_S * 1e9)


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(4096, kind="test") as made:
        yield made


@pytest.mark.parametrize("value", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_words_keep_their_values_and_touch_nothing_else(value: int, segment: Segment) -> None:
    words = segment.view(np.int32, 0, 4)
    store_release(segment.address + 4, value)
    assert load_acquire(segment.address + 4) == value
    assert list(words) == [0, value, 0, 0]
    longs = segment.view(np.int64, 64, 3)
    store_release_64(segment.address + 72, value * 2**32)
    assert load_acquire_64(segment.address + 72) == value * 2**32
    assert list(longs) == [0, value * 2**32, 0]
    del words, longs


def test_the_clock_is_that_of_python() -> None:
    before = time.monotonic_ns()
    now = monotonic_ns()
    assert before <= now <= time.monotonic_ns()


@pytest.mark.parametrize("target", [1, wrap(2**31), wrap(2**32)])
def test_a_spin_ends_when_the_word_comes_or_time_is_up(target: int, segment: Segment) -> None:
    store_release(segment.address, wrap(target - 1))
    assert not spin_until(segment.address, target, 1_000_000)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(spin_until(segment.address, target, _LONG_NS)))
    thread.start()
    time.sleep(0.01)
    store_release(segment.address, wrap(target + 5))
    thread.join(DEADLINE_S)
    assert found == [True]


def test_a_long_spin_takes_no_stack() -> None:
    """With the smallest stack; every read of the clock once took 16 bytes."""
    code = """
import ctypes, threading
from corun.shm.atomics import spin_until
word = ctypes.c_int32(0)
spin_until(ctypes.addressof(word), 1, 1)
threading.stack_size(64 << 10)
thread = threading.Thread(target=spin_until, args=(ctypes.addressof(word), 1, 300_000_000))
thread.start()
thread.join()
print("done")
"""
    with program(code) as child:
        assert finish(child) == "done\n"


# In a child, because the thread that spins for ever can be ended in no other way.
_SPINNERS = """
import ctypes, sys, threading
import numba
import numpy as np
from corun.shm.atomics import spin_until, store_release

@numba.njit("void(int32[::1], int32)", nogil=True)
def spin_plainly(words, target):
    words[1] = 1
    while words[0] < target:
        pass

words = np.zeros(16, np.int32)
ours = threading.Thread(target=spin_until, args=(words.ctypes.data, 1, 10**11), daemon=True)
plain = threading.Thread(target=spin_plainly, args=(words, 1), daemon=True)
ours.start()
plain.start()
while not words[1]:
    threading.Event().wait(0.001)
threading.Event().wait(0.2)
store_release(words.ctypes.data, 1)
ours.join()
print("ours ended", flush=True)
plain.join(1.0)
print("the plain one", "goes on" if plain.is_alive() else "ended", flush=True)
sys.stdin.readline()
"""


def test_a_plain_load_spins_for_ever_and_ours_does_not() -> None:
    with program(_SPINNERS) as child:
        assert line_of(child) == "ours ended"
        assert line_of(child) == "the plain one goes on"


_READER = """
import sys
import numba
import numpy as np
from corun.shm.atomics import spin_until, store_release
from corun.shm.segment import Segment

@numba.njit("int64(int64, int64[::1], int32)", nogil=True)
def read(base, words, num_messages):
    wrong = 0
    for message in range(1, num_messages + 1):
        if not spin_until(base, message, 60_000_000_000):
            return -1
        for index in range(len(words)):
            wrong += words[index] != message * (index + 1)
        store_release(base + 64, message)
    return wrong

segment = Segment.attach(int(sys.argv[1]), kind="test")
print("ready", flush=True)
print(read(segment.address, segment.view(np.int64, 128, 64), int(sys.argv[2])))
"""


@numba.njit("boolean(int64, int64[::1], int32)", nogil=True)  # type: ignore[untyped-decorator]
def _write(base: int, words: np.ndarray, num_messages: int) -> bool:
    for message in range(1, num_messages + 1):
        for index in range(len(words)):
            words[index] = message * (index + 1)
        store_release(base, message)
        if not spin_until(base + 64, message, 60_000_000_000):
            return False
    return True


def test_what_is_stored_before_a_release_is_there_after_the_acquire(segment: Segment) -> None:
    num_messages = 1000
    with program(_READER, segment.fd, num_messages, pass_fds=[segment.fd]) as reader:
        assert line_of(reader) == "ready"
        assert _write(segment.address, segment.view(np.int64, 128, 64), num_messages)
        assert finish(reader) == "0\n"


def test_a_spin_pauses() -> None:
    @numba.njit("void()")  # type: ignore[untyped-decorator]
    def spin() -> None:
        pause()

    assembly = "".join(spin.inspect_asm().values())
    assert {"x86_64": "pause", "aarch64": "yield"}[platform.machine()] in assembly


@pytest.mark.parametrize(
    ("machine", "triple", "instruction"),
    [
        ("x86_64", "x86_64-unknown-linux-gnu", "pause"),
        ("aarch64", "aarch64-unknown-linux-gnu", "yield"),
        ("arm64", "aarch64-unknown-linux-gnu", "yield"),
        ("riscv64", "x86_64-unknown-linux-gnu", "ret"),
    ],
)
def test_each_machine_has_its_own_pause(machine: str, triple: str, instruction: str) -> None:
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "spin")
    builder = ir.IRBuilder(function.append_basic_block())
    atomics.emit_pause(builder, machine)
    builder.ret_void()
    target = llvmlite.binding.Target.from_triple(triple).create_target_machine()
    assembly = target.emit_assembly(llvmlite.binding.parse_assembly(str(module)))
    assert instruction in assembly
    assert ("pause" in assembly) == (machine == "x86_64")
