"""The examples of the README do what it says, as they stand there."""

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

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ASKED = re.compile(r"^    ask (\S+) +'(.*)' +# (.*)$", re.MULTILINE)


@pytest.fixture
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def python_example(readme: str, word: str) -> str:
    """The one Python example that contains ``word``."""
    (found,) = (block for block in _BLOCK.findall(readme) if word in block)
    return str(found)


def commands(readme: str, *names: str) -> list[list[str]]:
    """All lines of the README that run one of these commands, as a shell takes them apart."""
    joined = readme.replace("\\\n", " ")
    found = re.findall(rf"^    corun ((?:{'|'.join(names)}) .*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.usefixtures("own_logging")
def test_simulations_work_where_nothing_was_measured(
    readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    found = commands(readme, "simulate", "plan")
    assert len(found) >= 3
    for arguments in found:
        small = ["--seeds", "1", "--requests", "30", "--jobs", "2"]
        small += ["--quick"] if arguments[0] == "plan" else []
        assert main([*arguments, *small]) == 0, capsys.readouterr().err
        assert "Simulated, not measured. Machine: " in capsys.readouterr().out
    assert (tmp_path / "results" / "load.png").exists()


def test_answers_of_the_demo(server: Served, readme: str) -> None:
    asked = [Question(*found) for found in _ASKED.findall(readme)]
    assert len(asked) >= 5
    assert ask_all(server.url, asked) == [question.answer for question in asked]


def test_engine_example(readme: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = python_example(readme, "with Engine(model")
    exec(compile(source, "README.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["You said: hello world", "HELLO WORLD"]
    promised = re.search(r"print\(.*# (.*), then (.*)$", source, re.MULTILINE)
    assert promised is not None
    assert list(promised.groups()) == printed


def test_policy_example(
    readme: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, facts: PolicyFacts) -> SchedulerPolicy:
        raise AssertionError(f"the policy {name} was made")

    monkeypatch.setattr(scheduling, "make_policy", refuse)
    source = python_example(readme, "def candidates")
    exec(compile(source, "README.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.splitlines() == ["You said: one two three", "You said: one"]


def test_fastapi_example(readme: str) -> None:
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(python_example(readme, "FastAPI"), "README.md", "exec"), names)
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
