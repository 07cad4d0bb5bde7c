"""Helpers of a thread's kernels."""

import threading
from concurrent.futures import ThreadPoolExecutor

from corun.gpu.forward.kernel_threads import kernel_helpers, kernel_thread_ids, set_kernel_helpers


def _helpers() -> set[int | None]:
    return {one.native_id for one in threading.enumerate() if one.name.startswith("corun-helper-")}


def test_helpers_come_and_go_and_are_among_the_computing_threads() -> None:
    address = kernel_helpers()
    before = kernel_thread_ids()
    for number in (2, 1, 1, 0, 0, 3):
        set_kernel_helpers(number)
        try:
            assert len(_helpers()) == number
            assert kernel_thread_ids() == before | _helpers()
            assert kernel_helpers() == address
        finally:
            set_kernel_helpers(0)
    assert not _helpers()


def test_threads_have_helpers_of_their_own() -> None:
    with ThreadPoolExecutor(1) as other:
        set_kernel_helpers(1)
        try:
            assert other.submit(kernel_helpers).result() != kernel_helpers()
            other.submit(set_kernel_helpers, 0).result()
            assert len(_helpers()) == 1
        finally:
            set_kernel_helpers(0)
