"""Which files of an adapter's directory are opened, and that opening one never waits."""

import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from corun.runtime import file_calls
from corun.runtime.adapters.checkpoint import Checkpoint, is_complete
from corun.runtime.adapters.folder_files import (
    OWN_FILES,
    AdapterRoots,
    NotRegularError,
    OpenFolder,
    OutsideError,
    open_file,
    read_file,
)
from corun.runtime.adapters.peft_config import read_peft_config
from corun.runtime.errors import AdapterError
from corun.runtime.file_calls import Place, SilentError
from support.adapter_files import CONFIG, WEIGHTS, write_adapter
from support.residue import open_descriptors

NAME = "chat_template.jinja"
SECRET = "of another user"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter in ``--lora-dir``, with a secret elsewhere."""
    (tmp_path / "secret").write_text(SECRET)
    return write_adapter(tmp_path / "loras" / "sql")


@pytest.fixture
def roots(tmp_path: Path, folder: Path) -> AdapterRoots:
    return AdapterRoots.of(str(tmp_path / "loras"), ())


def read(folder: Path, roots: AdapterRoots = OWN_FILES, name: str = NAME) -> bytes | None:
    return read_file(folder, name, 100, roots)


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o666)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_socket, make_device])
@pytest.mark.parametrize("name", [NAME, CONFIG, WEIGHTS])
def test_what_is_no_regular_file_is_refused_at_once(
    folder: Path, make: Callable[[Path], None], name: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    before = open_descriptors()
    with pytest.raises(NotRegularError) as caught:
        open_file(folder, name)
    assert caught.value.strerror == "not a regular file"
    if name == CONFIG:
        with pytest.raises(AdapterError, match=f"{CONFIG}: not a regular file"):
            read_peft_config(folder)
    if name == WEIGHTS:
        with pytest.raises(AdapterError, match=f"{WEIGHTS}: not a regular file"):
            Checkpoint(folder, max_tensor_bytes=1 << 20)
        assert is_complete(folder) is None
    assert not open_descriptors() - before


@pytest.mark.parametrize("target", ["secret", "/dev/zero", "/etc/passwd", "/proc/self/environ"])
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_link_out_is_refused_with_the_directory_and_the_flag(
    folder: Path, roots: AdapterRoots, tmp_path: Path, target: str, is_relative: bool
) -> None:
    path = tmp_path / target
    (folder / NAME).symlink_to(os.path.relpath(path, folder) if is_relative else path)
    for one in (OWN_FILES, roots):
        with pytest.raises(OutsideError) as caught:
            read(folder, one)
        reason = str(caught.value.strerror)
        assert f"outside of its directory {folder}" in reason and "--allowed-lora-dirs" in reason
    assert f"--lora-dir {tmp_path / 'loras'}" in reason


def test_a_link_out_does_not_say_whether_its_target_exists(folder: Path, tmp_path: Path) -> None:
    reasons = set()
    for target in (tmp_path / "secret", tmp_path / "nothing", tmp_path, Path("/root/x/y")):
        (folder / NAME).unlink(missing_ok=True)
        (folder / NAME).symlink_to(target)
        with pytest.raises(OutsideError) as caught:
            read(folder)
        reasons.add(caught.value.strerror)
    assert len(reasons) == 1


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_weights_and_configuration_are_read_by_the_same_rule(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)

    def read_all() -> None:
        read_peft_config(folder)
        Checkpoint(folder, max_tensor_bytes=1 << 20)

    with pytest.raises(AdapterError, match="it is a link to a file outside of") as caught:
        read_all()
    assert str(folder / name) in str(caught.value)
    elsewhere = AdapterRoots.of(None, [str(tmp_path)])
    read_peft_config(folder, elsewhere)
    Checkpoint(folder, max_tensor_bytes=1 << 20, roots=elsewhere).close()
    assert is_complete(folder) is True  # it is not written any more
    assert is_complete(folder, elsewhere) is True


def test_links_within_the_roots_are_followed(folder: Path, roots: AdapterRoots, tmp_path: Path) -> None:
    (folder / "..data").mkdir()  # as Kubernetes mounts files
    (folder / "..data" / NAME).write_text("own")
    (folder / NAME).symlink_to(f"..data/{NAME}")
    assert read(folder) == b"own"
    (tmp_path / "loras" / "shared").write_text("versions share it")
    (folder / NAME).unlink()
    (folder / NAME).symlink_to("../shared")
    assert read(folder, roots) == b"versions share it"
    with pytest.raises(OutsideError):
        read(folder)
    (folder / NAME).unlink()
    (folder / NAME).symlink_to(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path)
    permitted = AdapterRoots.of(str(tmp_path / "loras"), [str(tmp_path / "link")])
    assert read(folder, permitted) == SECRET.encode()


def test_an_entry_of_the_directory_may_be_a_link_of_the_operator(
    folder: Path, roots: AdapterRoots, tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "elsewhere" / "v3")
    (other / NAME).write_text("its own")
    (tmp_path / "loras" / "current").symlink_to(other)
    assert read(tmp_path / "loras" / "current", roots) == b"its own"
    (other / NAME).unlink()
    (other / NAME).symlink_to("../../secret")
    with pytest.raises(OutsideError):
        read(tmp_path / "loras" / "current", roots)
    # Deeper directories are those of teams.
    (tmp_path / "loras" / "team").mkdir()
    (tmp_path / "loras" / "team" / "theirs").symlink_to(other)
    for name in (CONFIG, WEIGHTS, NAME, "nothing"):
        with pytest.raises(OutsideError, match="--lora-dir"):
            read(tmp_path / "loras" / "team" / "theirs", roots, name)


@pytest.mark.parametrize("option", ["allowed", "resolved"])
def test_nothing_leads_out_of_directories_that_clients_name(
    folder: Path, tmp_path: Path, option: str
) -> None:
    other = write_adapter(tmp_path / "elsewhere")
    roots = AdapterRoots.of(None, **{"allowed": (), option: [str(tmp_path / "loras")]})
    assert read(folder, roots, CONFIG)
    folder.rename(tmp_path / "moved")  # after it was loaded
    folder.symlink_to(other)
    with pytest.raises(OutsideError, match="loras"):
        read(folder, roots, CONFIG)


def test_snapshots_of_a_hub_link_to_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--acme--sql"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00").write_text("blob")
    (snapshot / NAME).symlink_to("../../blobs/f00")
    assert read(snapshot) == b"blob"
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "sql").symlink_to(snapshot)
    assert read(tmp_path / "loras" / "sql", AdapterRoots.of(str(tmp_path / "loras"), ())) == b"blob"
    (tmp_path / "hub" / "token").write_text(SECRET)
    (snapshot / NAME).unlink()
    (snapshot / NAME).symlink_to("../../../token")
    with pytest.raises(OutsideError):
        read(snapshot)


def test_a_link_that_is_swapped_while_it_is_opened_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked is what is read, at whichever time the link changes."""
    (folder / "good").write_text("good")
    (tmp_path / "other").write_text(SECRET)
    real, num_left = os.open, 0

    def link(target: str | Path) -> None:
        (folder / "next").symlink_to(target)
        (folder / "next").replace(folder / NAME)

    def swap_then_open(path: object, flags: int, *args: int, **options: int) -> int:
        nonlocal num_left
        num_left -= 1
        if num_left == -1:
            link(tmp_path / "other")
        return real(path, flags, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", swap_then_open)
    found = set[bytes | None]()
    for number in range(4):
        link("good")
        num_left = number
        try:
            found.add(read(folder))
        except OutsideError:
            found.add(b"refused")
    assert found == {b"good", b"refused"}


@pytest.fixture
def namespace_root(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """The root of a process whose own mounts show other files in the place of ``folder``."""
    script = f"mount --bind {tmp_path} {folder} && mount --bind {tmp_path} /mnt && echo && read x"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("this machine lets no process make a mount namespace")
        yield Path(f"/proc/{process.pid}/root")


def test_a_link_into_a_mount_namespace_of_another_process_is_refused(
    folder: Path, roots: AdapterRoots, tmp_path: Path, namespace_root: Path
) -> None:
    """The path of a file there may look like that of a file of this adapter."""
    shown = Path(f"{namespace_root}{folder}") / "secret"
    assert shown.read_text() == SECRET
    (folder / NAME).symlink_to(shown)
    for which in (OWN_FILES, roots, AdapterRoots.of(None, [str(tmp_path / "loras")])):
        with pytest.raises(OutsideError):
            read(folder, which)
    # As a directory: the root of such a namespace is an ancestor of all files.
    (tmp_path / "loras" / "entry").symlink_to(f"{namespace_root}/mnt")
    for name in ("secret", "nothing"):
        with pytest.raises(OutsideError):
            read(tmp_path / "loras" / "entry", roots, name)


def test_links_to_files_of_processes_are_refused(folder: Path, roots: AdapterRoots) -> None:
    with open(folder / CONFIG, "rb") as own, open(folder / "gone", "w+b") as gone:
        (folder / "gone").unlink()
        for target in ("/proc/self/environ", "/proc/self/mem", "/dev/stdin", "/proc/self/root"):
            (folder / NAME).unlink(missing_ok=True)
            (folder / NAME).symlink_to(target)
            with pytest.raises(OutsideError):
                read(folder, roots)
        for file in (own, gone):
            (folder / NAME).unlink()
            (folder / NAME).symlink_to(f"/proc/self/fd/{file.fileno()}")
            assert read_file(folder, NAME, 10_000, roots) is not None


def test_an_allowed_directory_that_stops_answering_stays_where_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "loras")
    roots = AdapterRoots.of(None, [str(tmp_path / "link")])
    assert read(folder, roots, CONFIG) is not None
    folder.rename(tmp_path / "moved")
    folder.symlink_to(write_adapter(tmp_path / "elsewhere"))
    call = file_calls.FILES.call

    def silent(function: Callable[..., object], path: str, timeout_s: float | None = None) -> object:
        if path == str(tmp_path / "link"):
            raise SilentError(path, 1.0)
        return call(function, path, timeout_s)

    monkeypatch.setattr(file_calls.FILES, "call", silent)
    with pytest.raises(OutsideError):
        read(folder, roots, CONFIG)


def test_files_of_an_open_folder_are_of_the_directory_that_was_found(
    folder: Path, roots: AdapterRoots, tmp_path: Path
) -> None:
    """Also if another one has its name since."""
    (folder / NAME).write_text("old")
    (folder / "link").symlink_to(NAME)
    before, place = open_descriptors(), Place(str(folder))
    with OpenFolder(folder, roots) as opened:
        folder.rename(tmp_path / "loras" / "moved")
        (write_adapter(folder) / NAME).write_text("new")
        assert opened.read(NAME, 100, place) == opened.read("link", 100, place) == b"old"
        (tmp_path / "loras" / "moved" / "link").unlink()
        (tmp_path / "loras" / "moved" / "link").symlink_to(tmp_path / "secret")
        with pytest.raises(OutsideError):
            opened.open("link")
        with pytest.raises(FileNotFoundError):
            opened.open("nothing")
    assert read(folder, roots) == b"new"
    with pytest.raises(FileNotFoundError):
        OpenFolder(tmp_path / "nowhere")
    assert not open_descriptors() - before


def test_sizes_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / NAME).write_bytes(b"x" * 100)
    assert read(folder) == b"x" * 100
    (folder / NAME).write_bytes(b"x" * 101)
    assert read(folder) is None
    os.truncate(folder / NAME, 1 << 40)  # sparse
    assert read(folder) is None
    # A file that grows while it is read.
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0,) * 10))
    os.truncate(folder / NAME, 1 << 30)
    assert read(folder) is None


def test_a_header_of_a_sparse_file_is_not_read(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write((1 << 39).to_bytes(8, "little"))
        file.truncate(1 << 40)
    assert is_complete(folder) is False
    with pytest.raises(AdapterError, match="its header has 549755813888 bytes, more than"):
        Checkpoint(folder, max_tensor_bytes=1 << 41)


class StuckFiles:
    """Stands for a mount that does not answer: opening files of one directory waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.answers = threading.Event()
        real = os.open

        def stuck(path: object, flags: int, *args: int, **options: int) -> int:
            if str(path).startswith(str(folder)):
                assert self.answers.wait(20.0)
            return real(path, flags, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", stuck)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[StuckFiles]:
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 0.1)
    files = StuckFiles(monkeypatch, folder)
    yield files
    files.answers.set()


def test_a_file_system_that_does_not_answer_is_an_error(
    folder: Path, stuck: StuckFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SilentError):
        read(folder)
    with pytest.raises(AdapterError, match="the file system does not answer"):
        read_peft_config(folder)
    with pytest.raises(AdapterError, match="the file system does not answer"):
        Checkpoint(folder, max_tensor_bytes=1 << 20)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 20.0)
    other = write_adapter(tmp_path / "other")
    assert read_peft_config(other).r == 8


def test_a_read_that_does_not_return_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.01)
    answers, real = threading.Event(), os.preadv
    with Checkpoint(folder, max_tensor_bytes=1 << 20) as checkpoint:
        data = [bytes(part) for _, part in checkpoint.read(checkpoint.tensors)]
        monkeypatch.setattr(file_calls.FILES, "timeout_s", 0.1)

        def stuck(file: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
            if flags:
                raise BlockingIOError  # it is not in memory
            assert answers.wait(20.0)
            return real(file, buffers, at)

        monkeypatch.setattr(os, "preadv", stuck)
        with pytest.raises(AdapterError, match="the file system does not answer"):
            next(checkpoint.read(checkpoint.tensors))
        answers.set()
    deadline_s = time.monotonic() + 20.0
    while file_calls.FILES.is_silent(str(folder)):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 20.0)
    with Checkpoint(folder, max_tensor_bytes=1 << 20) as checkpoint:
        assert [bytes(part) for _, part in checkpoint.read(checkpoint.tensors)] == data


def test_files_are_read_where_reading_without_waiting_is_not_supported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_refused = os.preadv, 0

    def without(file: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        nonlocal num_refused
        if flags:
            num_refused += 1
            raise OSError(95, "Operation not supported")
        return real(file, [buffers[0][:100]], at)  # a part

    with Checkpoint(folder, max_tensor_bytes=1 << 20) as checkpoint:
        data = [bytes(part) for _, part in checkpoint.read(checkpoint.tensors)]
    monkeypatch.setattr(os, "preadv", without)
    with Checkpoint(folder, max_tensor_bytes=1 << 20) as checkpoint:
        assert [bytes(part) for _, part in checkpoint.read(checkpoint.tensors)] == data
    assert num_refused == 1
