"""A small copy shows up to which length packed rows are exact despite thresholds."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.execution.threshold_probe import ThresholdVerdict, judge_thresholds
from corun.gpu.model import attention_hook
from corun.gpu.model.attention_hook import Sight
from support.architectures import make_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_TOKENS = 512


def skeleton(model_type: str, **config: Any) -> PreTrainedModel:
    """A model of real sizes, without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    return model


@pytest.mark.parametrize("name", ["phimoe-window", "afmoe", "gemma2", "phi3-longrope"])
def test_windows_and_rotary_embeddings_that_are_served(name: str) -> None:
    assert judge_thresholds(make_model(name), MAX_TOKENS, None) == ThresholdVerdict()


def test_a_model_without_thresholds_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "probe_step", None)
    assert judge_thresholds(make_model("gpt-neox"), MAX_TOKENS, None) == ThresholdVerdict()
    # Thresholds beyond all requests and steps do not count.
    assert judge_thresholds(make_model("llama4"), 31, None) == ThresholdVerdict()


@pytest.mark.parametrize(
    ("floor_scale", "chunk", "expected"), [(8192, 8192, 8191), (4000, 8192, 3999), (8192, 1000, 8191)]
)
def test_a_temperature_by_the_place_in_the_step(floor_scale: int, chunk: int, expected: int) -> None:
    """Of real sizes, with the chunk or the temperature beginning first."""
    model = skeleton(
        "llama4_text",
        num_hidden_layers=4,
        hidden_size=640,
        num_attention_heads=10,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=100_000,
        floor_scale=floor_scale,
        attention_chunk_size=chunk,
    )
    verdict = judge_thresholds(model, 100_000, None)
    assert (verdict.outcome, verdict.num_tokens) == ("limited", expected)
    assert "floor_scale" in verdict.reason


def test_a_window_that_is_lost_is_seen_at_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any name of the number and any source of it."""
    monkeypatch.setattr(attention_hook, "read_mask", lambda *_, **__: Sight())
    model = skeleton("phimoe", sliding_window=2047, num_hidden_layers=4, max_position_embeddings=4096)
    verdict = judge_thresholds(model, 4096, None)
    assert verdict == ThresholdVerdict("limited", 2046, "sliding_window = 2047")


def test_a_copy_that_is_always_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRunner.probe_step
    monkeypatch.setattr(ModelRunner, "probe_step", lambda *given: run(*given) + 1.0)
    verdict = judge_thresholds(make_model("mistral"), MAX_TOKENS, None)
    assert verdict.outcome == "right"  # its window is within what the parity probe sees
    verdict = judge_thresholds(make_model("phimoe-window"), MAX_TOKENS, None)
    assert verdict.outcome == "wrong"
    assert "relative error" in verdict.reason and "sliding_window" in verdict.reason


def test_a_class_that_cannot_be_copied_is_told() -> None:
    model = make_model("phimoe-window")
    model.config.num_attention_heads = 0
    verdict = judge_thresholds(model, MAX_TOKENS, None)
    assert verdict.outcome == "untried" and verdict.reason


def test_a_copy_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "probe_step", None)
    verdict = judge_thresholds(make_model("phimoe-window"), MAX_TOKENS, None)
    assert verdict.outcome == "untried" and "not callable" in verdict.reason


def mark(directory: Path) -> None:
    """Change the only stored verdict."""
    (path,) = directory.iterdir()
    path.write_text(json.dumps({"outcome": "limited", "num_tokens": 7, "reason": "marked"}))


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the verdict on a model."""
    folder = tmp_path_factory.mktemp("kept") / "new"
    found = judge_thresholds(make_model("llama4"), MAX_TOKENS, folder)
    assert (found.outcome, found.num_tokens) == ("limited", 35)
    return folder


class TestKept:
    """Stored verdicts are found by what they depend on."""

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return make_model("llama4")

    @pytest.fixture
    def kept(self, verdict: Path, tmp_path: Path) -> Path:
        return shutil.copytree(verdict, tmp_path / "kept")

    def test_it_is_found(self, model: PreTrainedModel, kept: Path) -> None:
        mark(kept)
        assert judge_thresholds(model, MAX_TOKENS, kept).num_tokens == 7
        other = make_model("llama4", seed=1)
        assert judge_thresholds(other, MAX_TOKENS, kept).num_tokens == 7

    @pytest.mark.parametrize("change", ["configuration", "version", "max_tokens"])
    def test_what_it_depends_on(
        self, model: PreTrainedModel, kept: Path, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mark(kept)
        max_tokens = MAX_TOKENS
        if change == "configuration":
            model.config.floor_scale = 40
        elif change == "version":
            monkeypatch.setattr(transformers, "__version__", "0")
        else:
            max_tokens -= 1
        assert judge_thresholds(model, max_tokens, kept).num_tokens in (35, 39)

    @pytest.mark.parametrize("content", [b"\xff", b'{"num_tokens": "many"}'])
    def test_a_damaged_file_is_made_again(self, model: PreTrainedModel, kept: Path, content: bytes) -> None:
        (path,) = kept.iterdir()
        before = path.read_bytes()
        path.write_bytes(content)
        assert judge_thresholds(model, MAX_TOKENS, kept).num_tokens == 35
        assert path.read_bytes() == before

    def test_a_directory_that_cannot_be_written(
        self, model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        blocked = tmp_path / "file"
        blocked.touch()
        verdict = judge_thresholds(model, MAX_TOKENS, blocked)
        assert verdict.num_tokens == 35
        assert "cannot write" in caplog.text
