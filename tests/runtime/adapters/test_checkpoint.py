"""Reading of safetensors files, good and bad."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corun.runtime.adapters.checkpoint import Checkpoint
from corun.runtime.adapters.resolved import RawTensor
from corun.runtime.errors import AdapterError
from safetensors.numpy import save_file

_NAME = "adapter_model.safetensors"


def write(directory: Path, **tensors: np.ndarray) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(
        tensors or {"b": np.zeros((2, 1), np.float16), "a": np.arange(3.0)}, directory / _NAME
    )
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


def test_a_file_that_grows_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
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
            values = {
                f"{name}{index}": generator.integers(0, 2, shape).astype(dtype) for name in "zab"
            }
            save_file(values, tmp_path / _NAME, metadata={"format": "pt"})
            found = read(tmp_path)
            assert [raw.name for raw, _ in found] == sorted(values)
            for raw, data in found:
                assert raw.shape == shape
                assert bytes(data) == values[raw.name].tobytes()


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
