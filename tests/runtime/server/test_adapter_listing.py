"""``GET /v1/lora_adapters``: pages, levels, one adapter, and an engine that is slow or dead."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from corun.runtime.adapters.info import DrainingVersion
from corun.runtime.cli.main import main
from corun.runtime.engine_state import Residency
from corun.runtime.errors import EngineDeadError
from corun.runtime.server.access import Access, Keys
from support.fake_engine import make_adapter

pytestmark = pytest.mark.usefixtures("own_logging")


def test_pages_are_by_name(http: httpx.Client, engine: Any) -> None:
    engine.adapters = {f"a{index:04}": make_adapter(f"a{index:04}") for index in range(2000)}
    whole = http.get("/v1/lora_adapters").json()
    assert (len(whole["data"]), whole["has_more"], whole["num_adapters"]) == (1000, True, 2000)
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 300}
    while True:
        page = http.get("/v1/lora_adapters", params=query).json()
        seen += [one["name"] for one in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = seen[-1]
    assert seen == sorted(engine.adapters)


def test_a_level_is_asked_for(http: httpx.Client) -> None:
    def names(level: str) -> list[str]:
        page = http.get("/v1/lora_adapters", params={"level": level}).json()
        return [one["name"] for one in page["data"]]

    assert (names("device"), names("host"), names("partial")) == (["upper"], ["digits"], [])
    assert names("disk") == ["broken"]
    assert (names("gpu"), names("cpu")) == (["upper"], ["digits"]), "names of earlier releases"


def test_all_is_shown_of_one(http: httpx.Client, engine: Any) -> None:
    residency = Residency(
        level="partial",
        num_groups=3,
        num_groups_loaded=2,
        loads={"host_to_device": (4, 0.5)},
        evictions={"device": {"kv": 1}},
        last_use_unix_s=12.5,
    )
    old = DrainingVersion("old", 4, 10, Residency(num_references=1))
    engine.adapters["x"] = type(make_adapter("x"))(
        "x", "/x", "ready", None, 8, 1 << 20, "new", True, residency, (old,)
    )
    one = http.get("/v1/lora_adapters/x").json()
    assert (one["level"], one["num_groups_loaded"], one["pinned"]) == ("partial", 2, True)
    assert one["loads"] == {"host_to_device": {"num_loads": 4, "seconds": 0.5}}
    assert one["evictions"] == {"device": {"kv": 1}}
    assert one["age_s"] == 0.5 and not one["resident"]
    (draining,) = one["draining"]
    assert (draining["version"], draining["num_references"]) == ("old", 1)


def test_what_fits_is_counted_beside_what_runs(http: httpx.Client, engine: Any) -> None:
    engine.stats = engine.stats.__class__(adapter_room_bytes=(1 << 20) + 1)
    assert http.get("/v1/lora_adapters").json()["num_fitting"] == 1


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ("limit=0", "limit", "limit is '0', expected 1 to 1000"),
        ("limit=1001", "limit", "1 to 1000"),
        ("limit=ten", "limit", "1 to 1000"),
        ("limit=99999999999999999999", "limit", "1 to 1000"),
        ("level=ram", "level", "unknown level 'ram'; choose one of device, partial, host, disk"),
        ("page=2", "page", "unknown parameter 'page'; known: limit, after, level"),
    ],
)
def test_what_cannot_be_listed(http: httpx.Client, query: str, param: str, says: str) -> None:
    answer = http.get(f"/v1/lora_adapters?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_names_that_are_not_there_or_are_written_oddly(http: httpx.Client, engine: Any) -> None:
    engine.adapters["team/up per"] = make_adapter("team/up per")
    for written in ("team/up%20per", "team%2Fup%20per"):
        assert http.get(f"/v1/lora_adapters/{written}").json()["name"] == "team/up per"
    answer = http.get("/v1/lora_adapters/uper")
    assert answer.status_code == 404
    assert "did you mean 'upper'" in answer.json()["error"]["message"]


def test_a_dead_engine_and_the_key(start_server: Callable[..., Any], engine: Any) -> None:
    engine = type(engine)()
    server = start_server(engine, access=Access(Keys(["secret"])))
    assert httpx.get(f"{server.url}/v1/lora_adapters").status_code == 401
    keyed = httpx.Client(base_url=server.url, headers={"Authorization": "Bearer secret"})
    with keyed:
        assert keyed.get("/v1/lora_adapters/upper").status_code == 200
        engine.error = EngineDeadError("the device is lost")
        for path in ("", "/upper"):
            assert keyed.get(f"/v1/lora_adapters{path}").status_code == 503


def test_the_command_reads_all_pages(
    start_server: Callable[..., Any],
    engine: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CORUN_API_KEY", raising=False)
    engine = type(engine)()
    engine.adapters = {f"a{index:04}": make_adapter(f"a{index:04}") for index in range(1200)}
    server = start_server(engine, access=Access(Keys(["secret"])))
    assert main(["adapters", "--url", f"{server.url}/v1/", "--api-key", "secret"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1202 and lines[1].startswith("a0000") and "1200 adapters" in lines[-1]
    assert main(["adapters", "--url", server.url]) == 1
    assert "answers 401: " in capsys.readouterr().err
    assert main(["adapters", "--url", server.url, "--api-key", "secret", "--level", "x"]) == 1
    assert "unknown level 'x'" in capsys.readouterr().err
    monkeypatch.setenv("CORUN_API_KEY", "'secret' other")
    assert main(["adapters", "--url", server.url]) == 0
