"""``corun adapters``: the table, and the error without a server."""

import socket
import threading

import msgspec
import pytest
from corun.runtime.adapters.info import AdapterInfo, DrainingVersion
from corun.runtime.cli.adapters import summary, table
from corun.runtime.cli.main import main
from corun.runtime.engine_state import Residency
from corun.runtime.server.adapter_listing import adapter_json

pytestmark = pytest.mark.usefixtures("own_logging")

MIB = 2**20
NOW_S = 1_000_000.0


def test_the_table_says_where_each_version_is() -> None:
    there = Residency(
        level="device",
        device_bytes=3 * MIB,
        host_bytes=4 * MIB,
        kv_device_bytes=MIB // 2,
        num_references=2,
        num_uses=123,
        last_use_unix_s=NOW_S - 90,
    )
    coming = Residency(level="partial", num_groups=4, num_groups_loaded=1, num_waiting=3)
    adapters = [
        AdapterInfo(
            "first",
            "/x",
            "ready",
            None,
            8,
            3 * MIB,
            "ab",
            pinned=True,
            residency=there,
            draining=(DrainingVersion("cd", 16, MIB, coming),),
        ),
        AdapterInfo("second-one", "/y", "failed", "rank 512 is over the limit", 0, 0, ""),
    ]
    # As it comes over the wire.
    data = msgspec.json.decode(msgspec.json.encode([adapter_json(one) for one in adapters]))
    assert [line.split() for line in table(data, NOW_S)] == [
        ["name", "level", "rank", "device", "host", "KV", "running", "waiting", "uses", "last", "use"],
        [
            "first",
            "device",
            "8",
            "3.0",
            "MiB",
            "4.0",
            "MiB",
            "0.5",
            "MiB",
            "2",
            "0",
            "123",
            "2",
            "min",
            "ago",
            "pinned",
        ],
        ["partial", "1/4", "16", "-", "-", "-", "0", "3", "0", "-", "drains"],
        [
            "second-one",
            "disk",
            "0",
            "-",
            "-",
            "-",
            "0",
            "0",
            "0",
            "-",
            "failed,",
            "rank",
            "512",
            "is",
            "over",
            "the",
            "limit",
        ],
    ]
    heading, first, *_ = table(data, NOW_S)
    assert first.index("device") == heading.index("level"), "words are aligned to the left"
    assert first.index(" 8 ") + 1 == heading.index("rank") + 3, "numbers to the right"


def test_the_summary_says_how_many_fit_and_how_old_it_is() -> None:
    page = {"num_adapters": 7, "num_fitting": 5, "age_s": 0.04}
    assert summary(page, 7).startswith("7 adapters; 5 fit")
    assert summary(page, 2).startswith("2 of 7 adapters") and "0.0 s ago" in summary(page, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--url", "localhost:8000"], 2, "--url is 'localhost:8000', expected something like http"),
        (["--url", "http://127.0.0.1:80,"], 2, "--url is 'http://127.0.0.1:80,', expected"),
        (["--url", "http://[::1"], 2, "--url is 'http://[::1', expected"),
        (["--url", "http://:80"], 2, "--url is 'http://:80', expected"),
        (["--url", "http://a b"], 2, "--url is 'http://a b', expected"),
        (["--url", "http://127.0.0.1:9"], 1, "cannot be read: "),
        (["--urls", "x"], 2, "unknown option --urls (did you mean --url?)"),
    ],
)
def test_what_cannot_be_asked(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", *arguments]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 500 No\r\n\r\nno",
    ],
)
def test_what_is_no_server_of_ours_is_one_line(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert main(["adapters", "--url", f"http://127.0.0.1:{sock.getsockname()[1]}"]) == 1
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("corun: error: http://127.0.0.1:")
