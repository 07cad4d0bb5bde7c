"""``corun check`` prints the report and says with its exit code whether the adapter fits."""

from pathlib import Path

import pytest
from corun.runtime.cli.main import main
from corun.runtime.demo import demo_adapters_path
from support.architectures import ARCHITECTURES
from support.peft_adapters import save_adapter

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "model"
    ARCHITECTURES["llama3-rope"].config().save_pretrained(directory)
    return str(directory)


def test_exit_code_says_whether_it_fits(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(tmp_path / "adapter")
    adapter = str(tmp_path / "adapter")
    assert main(["check", adapter, "--model", model]) == 0
    assert f"{adapter} can be served over {model}" in capsys.readouterr().out
    assert main(["check", adapter, "--model", model, "--max-lora-rank", "1"]) == 1
    assert "cannot be served" in capsys.readouterr().out


def test_without_a_model_it_is_the_demos(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(demo_adapters_path() / "reverse")]) == 0
    assert "corun-demo" in capsys.readouterr().out


def test_no_model_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path), "--model", str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("corun: error: ")
