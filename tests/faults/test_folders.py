"""Directories of adapters with anything in them, beside streams: all other adapters are served."""

import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path
from support.attacked import Attacked, Rows, streams_on
from support.serving import Served, corun_command, wait_until

pytestmark = pytest.mark.faults

CONFIG, WEIGHTS, TEMPLATE = ("adapter_config.json", "adapter_model.safetensors", "chat_template.jinja")
SETTLED_S = 10.0  # after which a deleted adapter is not served
ANSWER_TIMEOUT_S = 15.0
NUM_CLIENTS = 6
NUM_ASKED = 18  # of each faulty adapter
NUM_GOING = 60  # adapters to delete, one in each attack
NUM_LOADS = 30
SECRETS = ("root:", "olleh")  # of a file elsewhere, and of an adapter elsewhere
REFUSED = {400, 404}
# Root reads everything; a user without capabilities in a namespace of its own does not.
CAN_UNSHARE = os.system("unshare --user true 2>/dev/null") == 0


def make_socket(path: Path) -> None:
    one = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    os.chdir(path.parent)  # as the path of a socket is short
    try:
        one.bind(path.name)
    finally:
        os.chdir(before)
        one.close()


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError as error:
        pytest.skip(f"no device can be made: {error}")


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": make_device,
    "a socket": make_socket,
    "a link to /etc/passwd": lambda path: path.symlink_to("/etc/passwd"),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a file of 1 TiB": make_large,
    "a directory": Path.mkdir,
}


class Folders:
    """A server with ``--lora-dir`` and ``--allowed-lora-dirs``, and a new adapter to delete."""

    def __init__(self, root: Path) -> None:
        self.loras, self.allowed, self.elsewhere = (root / name for name in ("loras", "allowed", "elsewhere"))
        self._num_gone = 0
        self._staging = root / "staging"
        copy("upper", self.loras / "good")
        copy("upper", self.allowed / "swapped")
        copy("reverse", self.elsewhere)
        for number in range(NUM_GOING):
            copy("upper", self.loras / f"going-{number}")

    def put(self, name: str, change: Callable[[Path], object]) -> None:
        """Put a changed adapter there at once: before, it can be served."""
        change(copy("upper", self._staging))
        (self.loras / name).parent.mkdir(exist_ok=True)
        self._staging.rename(self.loras / name)

    def delete_one(self) -> str:
        name = f"going-{self._num_gone}"
        self._num_gone += 1
        shutil.rmtree(self.loras / name)
        return name


def copy(task: str, directory: Path) -> Path:
    shutil.copytree(demo_adapters_path() / task, directory)
    return directory


def replace_file(folder: Path, file: str, make: Callable[[Path], object]) -> None:
    (folder / file).unlink(missing_ok=True)
    make(folder / file)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.chmod(0o755)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def attacked(folders: Folders, rows: Rows) -> Iterator[Attacked]:
    command = ["unshare", "--user", *corun_command()] if CAN_UNSHARE else corun_command()
    options = (
        *"--device cpu --memory-gib 0.25".split(),
        *("--lora-dir", str(folders.loras)),
        *("--allowed-lora-dirs", str(folders.allowed)),
        "--allow-runtime-lora-updating",
    )
    with Served(*options, command=command) as served, streams_on(served, rows) as attacked:
        yield attacked


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    # Certificates, which it does not need, would take longer to read than the request.
    answer = httpx.post(served.url + path, json=body, timeout=ANSWER_TIMEOUT_S, verify=False)
    assert not any(secret in answer.text for secret in SECRETS), answer.text
    return answer


def complete(served: Served, name: str) -> int:
    body = {"model": name, "prompt": "abc", "max_tokens": 2}
    return post(served, "/v1/completions", body).status_code


def chat(served: Served, name: str) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}
    return post(served, "/v1/chat/completions", {**body, "temperature": 0})


def rendered(served: Served, name: str) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
    return post(served, "/tokenize", {**body, "return_token_strs": True})


def ask_many(served: Served, name: str) -> set[int]:
    asks: tuple[Callable[[], int], ...] = (
        lambda: complete(served, name),
        lambda: chat(served, name).status_code,
        lambda: rendered(served, name).status_code,
    )
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return set(pool.map(lambda number: asks[number % 3](), range(NUM_ASKED)))


def assert_good(served: Served) -> None:
    answer = chat(served, "good")
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "HELLO"


def judge(attacked: Attacked, folders: Folders, names: dict[str, set[int]]) -> str:
    """Ask for faulty adapters and a good one, and delete one. ``names``: allowed statuses."""
    served = attacked.served
    gone = folders.delete_one()
    began_s = time.monotonic()
    seen: set[int] = set()
    for name, allowed in names.items():
        seen |= (found := ask_many(served, name))
        assert found <= allowed, (name, found)
        assert_good(served)
    wait_until(lambda: complete(served, gone) == 404, SETTLED_S)
    gone_s = time.monotonic() - began_s
    for name, allowed in names.items():  # now that the directory has been looked at
        assert complete(served, name) in allowed
    assert_good(served)
    return f"{sorted(seen)}, deleted one gone after {gone_s:.1f} s"


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_an_adapter(attacked: Attacked, folders: Folders, kind: str) -> None:
    """Once for each file of an adapter, and as an entry of the directory."""
    names = {"bad-weights": REFUSED, "bad-config": REFUSED, "entry": REFUSED, "bad-template": {200} | REFUSED}

    def attack() -> str:
        try:
            for name, file in (("bad-weights", WEIGHTS), ("bad-config", CONFIG), ("bad-template", TEMPLATE)):
                folders.put(name, partial(replace_file, file=file, make=KINDS[kind]))
            KINDS[kind](folders.loras / "entry")
            return judge(attacked, folders, names)
        finally:
            for name in names:
                remove(folders.loras / name)

    attacked.check(f"{kind} in --lora-dir", attack)


def test_a_directory_without_permission(attacked: Attacked, folders: Folders) -> None:
    if not CAN_UNSHARE and os.geteuid() == 0:
        pytest.skip("root reads everything, and no user namespace can be made")
    names = {"closed": REFUSED, "closed-weights": REFUSED | {503}, "team/inside": REFUSED}

    def attack() -> str:
        try:
            folders.put("closed", lambda path: path.chmod(0))
            folders.put("closed-weights", lambda path: (path / WEIGHTS).chmod(0))
            (folders.loras / "team").mkdir(mode=0)
            folders.put("team/inside", lambda path: None)
            return judge(attacked, folders, names)
        finally:
            for name in ("closed", "closed-weights", "team"):
                remove(folders.loras / name)

    attacked.check("no permission in --lora-dir", attack)


def test_many_directories(attacked: Attacked, folders: Folders) -> None:
    def attack() -> str:
        many = folders.loras / "many"
        try:
            for number in range(1500):
                (many / str(number) / "a").mkdir(parents=True)
            return judge(attacked, folders, {"many/1": REFUSED})
        finally:
            remove(many)

    attacked.check("3,000 directories in --lora-dir", attack)


def test_an_adapter_that_becomes_a_link_while_it_loads(attacked: Attacked, folders: Folders) -> None:
    """Its directory and its weights are links to an adapter elsewhere, and are not, in turn."""
    place, kept = folders.allowed / "swapped", folders.allowed / "kept"
    served, is_over = attacked.served, threading.Event()

    def swap() -> None:
        while not is_over.wait(0.001):
            place.rename(kept)
            place.symlink_to(folders.elsewhere)
            is_over.wait(0.001)
            place.unlink()
            kept.rename(place)
            own = (place / WEIGHTS).rename(place / "own")
            (place / WEIGHTS).symlink_to(folders.elsewhere / WEIGHTS)
            is_over.wait(0.001)
            own.replace(place / WEIGHTS)

    def attack() -> str:
        is_over.clear()
        thread = threading.Thread(target=swap)
        thread.start()
        try:
            seen = []
            body = {"lora_name": "swapped", "lora_path": str(place), "load_inplace": True}
            for _ in range(NUM_LOADS):
                seen.append(post(served, "/v1/load_lora_adapter", body).status_code)
                answer = chat(served, "swapped")
                assert answer.status_code in (200, 400, 404, 503), answer.text
        finally:
            is_over.set()
            thread.join()
        assert set(seen) <= {200, 400}
        assert post(served, "/v1/load_lora_adapter", body).status_code == 200
        assert chat(served, "swapped").json()["choices"][0]["message"]["content"] == "HELLO"
        assert_good(served)
        return f"{seen.count(200)} x 200, {seen.count(400)} x 400"

    attacked.check("an adapter swapped for a link while it loads", attack)


def test_the_server_is_as_before(attacked: Attacked) -> None:
    """It runs after the others."""
    assert not [line for line in attacked.served.log_lines if "Traceback" in line]
    api = [one for one in attacked.served.processes if one.pid == attacked.served.process.pid]
    assert api[0].num_threads() < 40, "threads wait for files"
    assert attacked.served.engine.num_threads() < 60, "threads wait for files"
