"""``corun check`` prints the report and says with its exit code whether the adapter fits."""

import json
import struct
from pathlib import Path

import pytest
from corun.runtime.cli.main import main
from corun.runtime.demo import demo_adapters_path, demo_text_path
from support.architectures import ARCHITECTURES, save_model
from support.four_bit import store_in_four_bits
from support.peft_adapters import save_adapter
from support.stored_formats import store_in
from support.stored_integers import store_in_integers
from support.tokenizers import save_word_tokenizer

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


def test_names_that_are_no_text_are_escaped(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"base_model_name_or_path": "half \ud800"}))
    assert main(["check", str(path.parent), "--model", model]) == 0
    assert "base      half \\ud800\n" in capsys.readouterr().out
    path.write_text(json.dumps(fields | {"\ud800": 1}))
    assert main(["check", str(path.parent), "--model", model]) == 1
    assert "\\ud800=1 is refused" in capsys.readouterr().out


def test_without_a_model_it_is_the_demos(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(demo_adapters_path() / "reverse")]) == 0
    assert "corun-demo" in capsys.readouterr().out


def test_no_model_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path), "--model", str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("corun: error: ")


def test_needs_something_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert "needs an ADAPTER, or --quantization" in capsys.readouterr().err


def test_what_fewer_bits_cost_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = tmp_path / "text"
    text.write_text(demo_text_path().read_text()[:600])
    assert main(["check", "--quantization", "int8", "--text", str(text)]) == 0
    title, *figures = capsys.readouterr().out.splitlines()
    assert "corun-demo in int8, against bfloat16, over" in title
    assert [line.split()[0] for line in figures] == ["weights", "perplexity", "next"]
    assert "MiB before (57%)" in figures[0]
    agreement = float(figures[2].split("after ")[1].split("%")[0])
    assert 90 < agreement <= 100
    assert len(list(tmp_path.rglob("*.weights"))) == 1  # for the next start


def gguf(*fields: tuple[str, str]) -> bytes:
    """The beginning of a file: a number, these texts, and an array that is cut."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    found = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(fields) + 2)
    found += text("general.file_type") + struct.pack("<II", 4, 15)
    for key, value in fields:
        found += text(f"general.{key}") + struct.pack("<I", 8) + text(value)
    return found + text("general.tags") + struct.pack("<IIQ", 9, 8, 1 << 60)


@pytest.mark.parametrize("as_model", [True, False])
def test_a_gguf_file_is_named_with_what_to_do(
    as_model: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x-Q4_K_M.gguf"
    fields = [("architecture", "llama"), ("type", "model"), ("name", "Mine")]
    file.write_bytes(gguf(*fields, ("base_model.0.name", "Llama 3.1 8B")))
    asked = ["--model", str(file), "--quantization", "off"] if as_model else [str(file)]
    assert main(["check", *asked]) == 1
    err = capsys.readouterr().err
    assert "a GGUF file (llama, Mine), which corun does not read; serve the full model in" in err
    assert "that it was made from, Llama 3.1 8B; --quantization int4" in err


@pytest.mark.parametrize("num_bytes", [0, 3, 24, 60, 90])
def test_a_gguf_file_that_is_cut_or_an_adapter(
    num_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf(("type", "adapter"), ("architecture", "llama"))[:num_bytes])
    assert main(["check", str(file)]) == 1
    assert "is a GGUF adapter, which corun does not read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("int4", "llama3-rope"), ("nf4", "llama3-rope"), ("", "llama3-rope"), ("int4", "qwen3_moe")],
)
def test_what_a_quantised_checkpoint_loses(
    kind: str, architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints that are served as stored, and one that is served in full."""
    model = save_model(architecture, tmp_path / "model")
    save_word_tokenizer(model, 96)
    if architecture == "qwen3_moe":
        model = store_in("gptq act-order", model, tmp_path / "stored")
    elif kind == "int4":
        model = store_in_integers(model, tmp_path / "stored", "gptq")
    elif kind == "nf4":
        model = store_in_four_bits(model, tmp_path / "stored")
    text = tmp_path / "text"
    text.write_text(" ".join(f"t{number}" for number in range(3, 60)))
    asked = ["check", "--model", str(model), "--quantization", "off", "--text", str(text)]
    assert main(asked) == (0 if kind else 2)
    out, err = capsys.readouterr()
    if kind:
        assert f"in {kind}, against bfloat16, over" in out
        assert float(out.split("after ")[1].split("%")[0]) > 80
        # Of nf4 those of 96 inputs, which blocks of 64 cross; of the mixture its experts.
        are_in_full = kind == "nf4" or architecture == "qwen3_moe"
        assert ("matrices that the files have in fewer bits" in out) == are_in_full
    else:
        assert "is served in full; give --quantization int8 or int4" in err


@pytest.mark.parametrize(("content", "reason"), [(b"\xff", "codec"), (b"", "too few to predict")])
def test_texts_that_cannot_be_compared_on(
    tmp_path: Path, content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    assert main(["check", "--quantization", "int8", "--text", str(text)]) == 2
    assert reason in capsys.readouterr().err
