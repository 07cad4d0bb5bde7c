"""``corun profile --url``: from the command line to the file, and its refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corun.profiles.profile import load_profile
from corun.runtime.cli.main import main
from corun.runtime.server.listening import bind, listen, url_of
from support.architectures import save_model
from support.profiles import any_fit
from support.recorded_vllm import VllmOptions, vllm_in_a_thread

HERE = ("profile", "--url", "http://127.0.0.1:1", "--output", "p.json")
TOLD = ("--max-num-batched-tokens", "128", "--max-num-seqs", "4")
pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("profile", "--url", "host"), "--url is 'host', expected something like http://"),
        (HERE[:3], "also needs --output: the file of the profile"),
        (HERE, "also needs --max-num-batched-tokens: the value that the server was"),
        ((*HERE, *TOLD[:2]), "also needs --max-num-seqs: the value that the server was"),
        ((*HERE, *TOLD[:3], "many"), "--max-num-seqs is 'many', must be a whole number"),
        ((*HERE, *TOLD, "--picture", "x"), "--picture cannot be used with --url"),
        ((*HERE, *TOLD, "--budget-s", "9"), "--budget-s cannot be used with --url"),
        ((*HERE, *TOLD, "--block-size", "32"), "--block-size cannot be used with --url"),
        ((*HERE, *TOLD), "--url http://127.0.0.1:1: http://127.0.0.1:1/v1/models cannot be"),
        ((*HERE[:4], "/nowhere/p.json", *TOLD), "there is no directory /nowhere"),
        (("profile", "--max-num-seqs", "4"), "--max-num-seqs needs --url: it is for measuring"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("corun: error: ") and words in lines[0]
    assert output.out == ""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    options: dict[str, Any] = getattr(request, "param", {})
    with vllm_in_a_thread(VllmOptions(max_lora_rank=16, **options)) as url:
        yield url


def test_a_server_that_is_silent_has_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as sock:
        listen(sock)  # and never accept
        url = url_of(sock)
        assert main(("profile", "--url", url, *HERE[3:], *TOLD)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"corun: error: --url {url}: {url}/v1/models did not answer within 3 s"


def test_a_server_is_measured(
    server: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, model = tmp_path / "p.json", save_model("llama3-rope", tmp_path_factory.mktemp("model"))
    with any_fit():
        assert main(("profile", str(model), "--url", server, "--output", str(path), *TOLD)) == 0
    output = capsys.readouterr()
    assert "on vllm 0.32.0, measured from outside in" in output.out
    assert f"corun cluster --engine {server},kind=vllm,profile={path}" in output.out
    assert "measuring takes about" in output.err and "adapters, decode: " in output.err
    with any_fit():
        profile = load_profile(path)
    assert profile.server is not None and profile.server.max_num_seqs == 4
    assert len(profile.server.base_fingerprint) == 64
    assert [one.rank for one in profile.budgets] == [8, 16]
    assert list(tmp_path.iterdir()) == [path]


def test_times_that_predict_nothing_are_not_kept(
    server: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("corun.profiles.profile.MIN_USABLE_R_SQUARED", 1.5)
    monkeypatch.setattr("corun.profiles.profile.MAX_USABLE_ERROR", -1.0)
    path, model = tmp_path / "p.json", save_model("llama3-rope", tmp_path_factory.mktemp("model"))
    assert main(("profile", str(model), "--url", server, "--output", str(path), *TOLD)) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("corun: error: the profile cannot predict step times: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("server", "words"),
    [({"has_lora": False}, "--enable-lora"), ({"updates_loras": False}, "LORA_UPDATING=True"),
     ({}, "which is not on this machine: give MODEL")],
    indirect=["server"],
)  # fmt: skip
def test_a_server_that_cannot_be_measured_is_refused(
    server: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("profile", "--url", server, "--output", str(tmp_path / "p.json"), *TOLD)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and line.startswith("corun: error: ")
