"""The examples of the README and of ``docs/`` work as written."""

import re
import shlex
from pathlib import Path

import pytest
from corun import PolicyFacts, SchedulerPolicy
from corun.runtime.cli.main import main
from corun.runtime.engine.assembly import scheduling
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support.demo_answers import Question, ask_all
from support.serving import Served

_ASKED = re.compile(r"^    ask (\S+) +'(.*)' +# (.*)$", re.MULTILINE)


@pytest.fixture
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def sizing(repository: Path) -> str:
    return (repository / "docs" / "sizing.md").read_text(encoding="utf-8")


def run_example(repository: Path, name: str) -> dict[str, object]:
    """Run a file of ``docs/examples`` in this process and return its names."""
    path = repository / "docs" / "examples" / name
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names


def promised(repository: Path, name: str) -> list[str]:
    """What the comments behind the example's ``print`` calls say that it prints, in order."""
    source = (repository / "docs" / "examples" / name).read_text(encoding="utf-8")
    comments = re.findall(r"^ +print\(.*\)  # (.*)$", source, re.MULTILINE)
    return [line for comment in comments for line in comment.split(", then ")]


def commands(text: str, *names: str) -> list[list[str]]:
    """Return all lines of a page that run one of these commands, split as by a shell."""
    joined = text.replace("\\\n", " ")
    found = re.findall(rf"^    corun ((?:{'|'.join(names)}) .*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.usefixtures("own_logging")
def test_simulations_work_where_nothing_was_measured(
    sizing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    found = commands(sizing, "simulate", "plan")
    assert len(found) >= 3
    for arguments in found:
        small = ["--seeds", "1", "--requests", "30", "--jobs", "1"]
        small += ["--quick"] if arguments[0] == "plan" else []
        assert main([*arguments, *small]) == 0, capsys.readouterr().err
        assert "Simulated, not measured. Machine: " in capsys.readouterr().out
    assert (tmp_path / "results" / "load.png").exists()


def test_answers_of_the_demo(server: Served, readme: str) -> None:
    asked = [Question(*found) for found in _ASKED.findall(readme)]
    assert len(asked) >= 5
    assert ask_all(server.url, asked) == [question.answer for question in asked]


def test_engine_example(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "offline_generation.py"
    run_example(repository, name)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["You said: hello world", "HELLO WORLD"]
    assert promised(repository, name) == printed


def test_policy_example(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, facts: PolicyFacts) -> SchedulerPolicy:
        raise AssertionError(f"the policy {name} was made")

    monkeypatch.setattr(scheduling, "make_policy", refuse)
    name = "scheduling_policy.py"
    run_example(repository, name)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["You said: one two three", "You said: one"]
    assert promised(repository, name) == printed


def test_client_example(
    server: Served, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    run_example(repository, "openai_client.py")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "corun-demo"
    assert {"add", "reverse", "upper", "vowels"} <= set(printed[1:-2])
    assert printed[-2:] == ["HELLO WORLD", "stressed"]


def test_example_of_tools_and_schemas(
    server: Served, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    name = "tools_and_json.py"
    run_example(repository, name)
    printed = capsys.readouterr().out.splitlines()
    assert promised(repository, name) == printed
    assert len(printed) == 3


def test_fastapi_example(repository: Path) -> None:
    names = run_example(repository, "fastapi_app.py")
    app = names["app"]
    assert isinstance(app, FastAPI)
    with TestClient(app) as client:
        for adapter, text, expected in (
            ("upper", "hello world", "HELLO WORLD"),
            ("reverse", "planet", "tenalp"),
            ("vowels", "hello", "h*ll*"),
        ):
            answer = client.get(f"/{adapter}", params={"text": text})
            assert answer.status_code == 200
            assert answer.text == expected
        unknown = client.get("/nothing", params={"text": "hello"})
        assert unknown.status_code == 404
        assert "'nothing'" in unknown.text and "upper" in unknown.text
        too_long = client.get("/upper", params={"text": "x" * 5000})
        assert too_long.status_code == 400
        assert "maximum context length" in too_long.text
    stopped = TestClient(app).get("/upper", params={"text": "hello"})
    assert stopped.status_code == 503
