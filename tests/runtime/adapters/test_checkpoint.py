"""Reading of safetensors files, good and bad."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corun.runtime.adapters import checkpoint as checkpoint_module
from corun.runtime.adapters.checkpoint import Checkpoint, is_complete
from corun.runtime.adapters.digest import part_head
from corun.runtime.adapters.resolved import RawTensor
from corun.runtime.errors import AdapterError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.damage import JSON_VALUES, damaged, few_and_many

_NAME = "adapter_model.safetensors"


def write(directory: Path, **tensors: np.ndarray) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors or {"b": np.zeros((2, 1), np.float16), "a": np.arange(3.0)}, directory / _NAME)
    return directory


Tensor = tuple[RawTensor, memoryview]


def read(directory: Path, max_tensor_bytes: int = 1 << 20) -> list[Tensor]:
    with Checkpoint(directory, max_tensor_bytes=max_tensor_bytes) as checkpoint:
        tensors = checkpoint.read(checkpoint.tensors)
        found = [(raw, memoryview(bytearray(data))) for raw, data in tensors]
        checkpoint.check_unchanged()
        return found


def write_header(directory: Path, header: bytes, data: bytes = b"") -> Path:
    (directory / _NAME).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


def test_tensors_come_sorted_with_types_shapes_and_bytes(tmp_path: Path) -> None:
    (a, a_data), (b, b_data) = read(write(tmp_path))
    assert (a.name, a.dtype, a.shape) == ("a", "F64", (3,))
    assert (b.name, b.dtype, b.shape) == ("b", "F16", (2, 1))
    assert np.frombuffer(a_data, np.float64).tolist() == [0.0, 1.0, 2.0]
    assert b.num_bytes == b_data.nbytes == 4


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path) / _NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(AdapterError, match="truncated or damaged") as caught:
        read(tmp_path)
    assert str(path) in str(caught.value)


def test_bytes_at_the_end_that_no_tensor_has(tmp_path: Path) -> None:
    path = write(tmp_path) / _NAME
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(AdapterError, match="truncated or damaged"):
        read(tmp_path)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "num_data_bytes"),
    [
        (b"no json", 0),
        (b'"text"', 0),
        (b"[" * 100_000, 0),
        (b"\xff{}", 0),
        (b'{"a": 3}', 0),
        (json.dumps({"a": entry("F32", [-1], 0, 4)}).encode(), 4),
        (json.dumps({"a": {**entry("F32", [1], 0, 4), "shape": 1}}).encode(), 4),
        (json.dumps({"a": {**entry("F32", [1], 0, 4), "data_offsets": [0]}}).encode(), 4),
        (b'{"a": %b, "a": %b}' % ((json.dumps(entry("F32", [0], 0, 0)).encode(),) * 2), 0),
        (json.dumps({"a": entry("F32", [2], 0, 4)}).encode(), 4),  # size is not that of the shape
        (json.dumps({"a": entry("F32", [1], 4, 8)}).encode(), 8),  # a hole
        (json.dumps({"a": entry("F32", [1], 0, 400)}).encode(), 4),  # beyond the end
        (json.dumps({"a": entry("F99", [1], 0, 4)}).encode(), 4),
        (json.dumps({"a": entry("F32", [2**62, 2**62], 0, 4)}).encode(), 4),
        (json.dumps({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}).encode(), 4),
    ],
)
def test_damaged_header(tmp_path: Path, header: bytes, num_data_bytes: int) -> None:
    with pytest.raises(AdapterError, match="truncated or damaged"):
        read(write_header(tmp_path, header, bytes(num_data_bytes)))


def test_one_header_before_other_data_is_another_file(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "good").mkdir()
    for value in (b"1", b"2"):
        ((_, data),) = read(write_header(tmp_path / "good", header, value * 8))
        assert bytes(data) == value * 8
    with pytest.raises(AdapterError, match="truncated or damaged"):
        read(write_header(tmp_path, header, b"1" * 7))


def test_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="holds no tensors"):
        read(write_header(tmp_path, b"{}"))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"])
def test_pickle_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(AdapterError, match="pickle files can run code") as caught:
        read(tmp_path)
    assert name in str(caught.value)


def test_several_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors.index.json").write_text("{}")
    with pytest.raises(AdapterError, match="several files"):
        read(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"holds no adapter_model.safetensors"):
        read(tmp_path)


def test_a_file_larger_than_any_adapter_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path) / _NAME
    os.truncate(path, 1 << 40)  # sparse
    with pytest.raises(AdapterError, match="--max-lora-rank"):
        read(tmp_path)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path) / _NAME
    fstat = os.fstat

    def append_and_stat(descriptor: int) -> os.stat_result:
        result = fstat(descriptor)
        with path.open("ab") as file:
            file.write(b"more")
        return result

    monkeypatch.setattr(os, "fstat", append_and_stat)
    with pytest.raises(AdapterError, match="changed while it was read"):
        read(tmp_path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_BATCH_BYTES", 1)
    path = write(tmp_path) / _NAME
    with Checkpoint(tmp_path, max_tensor_bytes=1 << 20) as checkpoint:
        tensors = checkpoint.read(checkpoint.tensors)
        next(tensors)
        os.truncate(path, 20)
        with pytest.raises(AdapterError, match="changed while it was read"):
            next(tensors)


def test_a_file_that_is_written_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path) / _NAME
    with Checkpoint(tmp_path, max_tensor_bytes=1 << 20) as checkpoint:
        tensors = checkpoint.read(checkpoint.tensors)
        next(tensors)
        checkpoint.check_unchanged()
        os.utime(path, ns=(1, 1))
        next(tensors)
        with pytest.raises(AdapterError, match="changed while it was read"):
            checkpoint.check_unchanged()


def test_the_same_as_the_library_reads(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.int8, np.uint64, np.bool_):
        for index, shape in enumerate(((), (0,), (3, 5), (2, 1, 4))):
            values = {f"{name}{index}": generator.integers(0, 2, shape).astype(dtype) for name in "zab"}
            save_file(values, tmp_path / _NAME, metadata={"format": "pt"})
            found = read(tmp_path)
            assert [raw.name for raw, _ in found] == sorted(values)
            for raw, data in found:
                assert raw.shape == shape
                assert bytes(data) == values[raw.name].tobytes()


@pytest.mark.parametrize("batch_bytes", [1, 40, 1 << 20])
def test_batches_are_adjacent_small_and_framed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    """Also where each call of the kernel returns less than it is asked for."""
    monkeypatch.setattr(checkpoint_module, "_BATCH_BYTES", batch_bytes)
    preadv = os.preadv

    def read_some(descriptor: int, parts: Any, *where: int) -> int:
        first, *others = parts
        return preadv(descriptor, [first, others[0][:3]] if others else [first[:5]], *where)

    monkeypatch.setattr(os, "preadv", read_some)
    sizes = {"a": 5, "b": 0, "c": 3, "d": 9, "e": 1, "f": 2}
    values = {name: np.full(size, index, np.int32) for index, (name, size) in enumerate(sizes.items())}
    write(tmp_path, **values)
    with Checkpoint(tmp_path, max_tensor_bytes=1 << 20) as checkpoint:
        wanted = [one for one in checkpoint.tensors if one.name != "e"]  # f does not follow d
        batches = []
        for stored, framed in checkpoint.read_batches(wanted):
            batches.append([raw.name for raw, _ in stored])
            assert all(bytes(data) == values[raw.name].tobytes() for raw, data in stored)
            assert bytes(framed) == b"".join(part_head(len(data)) + data for _, data in stored)
    small = [["a"], ["b"], ["c"], ["d"]] if batch_bytes == 1 else [["a", "b", "c"], ["d"]]
    assert batches == [*(small if batch_bytes <= 40 else [["a", "b", "c", "d"]]), ["f"]]


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AdapterError, match="Permission denied"):
        read(tmp_path)


def test_tensors_come_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path)
    with Checkpoint(tmp_path, max_tensor_bytes=1 << 20) as checkpoint:
        found = [raw.name for raw, _ in checkpoint.read(reversed(checkpoint.tensors))]
    assert found == ["b", "a"]


def test_a_file_system_that_returns_parts_shows_no_incomplete_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parts(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            return super().readinto(memoryview(buffer)[:5])

        def read(self, size: int | None = -1) -> Any:
            return super().read(5 if size is None or size < 0 else min(size, 5))

    monkeypatch.setattr(
        checkpoint_module, "open_file", lambda folder, name, _: Parts(str(folder / name), "rb")
    )
    assert is_complete(write(tmp_path)) is True


NUM_CASES = [200, pytest.param(5_000, marks=pytest.mark.full)]


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_a_damaged_file_is_read_as_it_is_or_refused(tmp_path: Path, num_cases: int) -> None:
    path = write(tmp_path) / _NAME
    genuine = path.read_bytes()

    @few_and_many(num_cases)
    @given(data=damaged(genuine))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            found = read(tmp_path)
        except AdapterError:
            return
        assert is_complete(tmp_path)
        assert_is(found, data)

    check()


def assert_is(found: list[Tensor], data: bytes) -> None:
    """Compare tensors with the header, read in the simplest way."""
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    entries.pop("__metadata__", None)
    assert [raw.name for raw, _ in found] == sorted(entries)
    for raw, values in found:
        entry = entries[raw.name]
        begin, end = entry["data_offsets"]
        assert (raw.dtype, raw.shape) == (entry["dtype"], tuple(entry["shape"]))
        assert bytes(values) == data[start + begin : start + end]


_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", 1, None]),
        "shape": st.lists(st.integers(-1, 4) | JSON_VALUES, max_size=4) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(0, 16) | JSON_VALUES, max_size=3) | JSON_VALUES,
    }
)


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_any_header_is_read_as_it_is_or_refused(tmp_path: Path, num_cases: int) -> None:
    @few_and_many(num_cases)
    @given(
        header=st.dictionaries(
            st.sampled_from(["a", "b", "__metadata__", ""]), _ENTRIES | JSON_VALUES, max_size=3
        ),
        num_data_bytes=st.integers(0, 16),
    )
    def check(header: dict[str, Any], num_data_bytes: int) -> None:
        encoded = json.dumps(header).encode()
        write_header(tmp_path, encoded, bytes(num_data_bytes))
        try:
            found = read(tmp_path)
        except AdapterError:
            assert not is_complete(tmp_path) or not header.keys() - {"__metadata__"}
            return
        assert_is(found, (tmp_path / _NAME).read_bytes())

    check()


_LONG = 2**20
_BEGIN = b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":['


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (_BEGIN + b"9" + b",9" * _LONG + b"]}}", "1048577 dimensions, more than 8"),
        (_BEGIN + b"-1" + b",9" * _LONG + b"]}}", "no valid shape"),
        (b'{"%b":{"dtype":"F32"}}' % (b"a." * _LONG), "a name of 2097152 characters"),
        (b'{"a":{"dtype":"%b"}}' % (b"F" * _LONG), "the unknown type"),
        (b" " * (17 << 20), "more than 16777216"),
    ],
    ids=["many sizes", "many wrong sizes", "a long name", "a long type", "a long header"],
)
def test_a_header_that_would_take_long_is_refused_in_a_short_message(
    tmp_path: Path, header: bytes, reason: str
) -> None:
    write_header(tmp_path, header, bytes(4))
    with pytest.raises(AdapterError, match=reason) as caught:
        read(tmp_path, max_tensor_bytes=1 << 30)
    assert len(str(caught.value)) < 2000
    assert not is_complete(tmp_path)


def test_a_length_of_the_header_beyond_the_file_reads_nothing(tmp_path: Path) -> None:
    for length in (2**64 - 1, 2**63, 2**40):
        (tmp_path / _NAME).write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(AdapterError, match=f"its header should have {length} bytes"):
            read(tmp_path)
        assert not is_complete(tmp_path)
