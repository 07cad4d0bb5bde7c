"""``corun check``: the report, and that no base weights are needed."""

from pathlib import Path

import pytest
from corun.runtime.engine.assembly.adapter_check import run_check
from corun.runtime.errors import ModelError
from support.architectures import ARCHITECTURES
from support.peft_adapters import WEIGHTS, edit_config, edit_tensors, save_adapter


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A directory with a configuration and nothing else."""
    directory = tmp_path / "model"
    ARCHITECTURES["llama3-rope"].config().save_pretrained(directory)
    return str(directory)


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    save_adapter(directory, rank_pattern={"v_proj": 2}, use_rslora=True, lora_alpha=8)
    return directory


def test_report_of_a_good_adapter(adapter_dir: Path, model_dir: str) -> None:
    edit_config(adapter_dir, base_model_name_or_path=None)
    report = run_check(adapter_dir, model_dir)
    assert report.ok
    assert report.digest is not None
    assert report.lines() == (
        f"{adapter_dir} can be served over {model_dir}",
        "  rank      2, 4",
        "  scaling   4, 5.65685 (alpha / sqrt(rank), rsLoRA)",
        "  targets   4: q_proj x2, v_proj x2",
        "  layers    2: 0-1",
        "  bytes     5,632 on the device in float32",
        "  bytes     2,816 on the device in bfloat16 or float16",
        "  base      not named",
        f"  digest    {report.digest}",
    )


def test_dora_is_said_and_its_bytes_are_counted(tmp_path: Path, model_dir: str) -> None:
    save_adapter(tmp_path / "dora", rank_pattern={"v_proj": 2}, use_dora=True)
    lines = run_check(tmp_path / "dora", model_dir).lines()
    assert "  scaling   2, 4 (alpha / rank, DoRA)" in lines
    outputs = 2 * (64 + 32)
    assert f"  bytes     {5632 + 8 * outputs:,} on the device in float32" in lines


def test_the_output_head_is_in_no_layer(tmp_path: Path, model_dir: str) -> None:
    save_adapter(tmp_path / "head", target_modules=["lm_head"])
    edit_tensors(tmp_path / "head", base_layer=...)  # a copy, which needs the base's weights
    lines = run_check(tmp_path / "head", model_dir).lines()
    assert {"  targets   1: lm_head x1", "  layers    0"} <= set(lines)


def test_another_base_is_noted(adapter_dir: Path, model_dir: str) -> None:
    named = Path(model_dir).rename(Path(model_dir).with_name("Tiny-1B"))
    for base, note in (
        ("x/Tiny-1B", None),
        ("x/Other-1B", "made for x/Other-1B, not for the base model that is served (tiny-1b)"),
        ("x/Tiny-1B-AWQ", "a quantised copy of the base model, which is served in full"),
    ):
        edit_config(adapter_dir, base_model_name_or_path=base)
        report = run_check(adapter_dir, str(named))
        assert report.ok
        last = report.lines()[-1]
        assert last.startswith("  digest") if note is None else last.endswith(note)


def test_every_problem_is_listed(adapter_dir: Path, model_dir: str) -> None:
    edit_tensors(adapter_dir, lora_A=lambda tensor: tensor[:, 1:])
    report = run_check(adapter_dir, model_dir)
    assert not report.ok
    assert len(report.problems) == 4
    assert report.lines()[0] == f"{adapter_dir} cannot be served over {model_dir}: 4 problems"
    assert all(line.startswith("  - ") for line in report.lines()[1:])


def test_values_are_checked(adapter_dir: Path, model_dir: str) -> None:
    edit_tensors(adapter_dir, layers__0__self_attn__q_proj__lora_B=lambda tensor: tensor / 0)
    report = run_check(adapter_dir, model_dir)
    assert "not finite" in report.problems[0]
    assert report.lines()[0].endswith("1 problem")


def test_configuration_and_file_problems(adapter_dir: Path, model_dir: str) -> None:
    (adapter_dir / WEIGHTS).unlink()
    assert "holds no adapter_model.safetensors" in run_check(adapter_dir, model_dir).problems[0]
    edit_config(adapter_dir, lora_bias=True)
    assert "lora_bias" in run_check(adapter_dir, model_dir).problems[0]
    missing = run_check(adapter_dir / "nowhere", model_dir)
    assert "no such adapter directory" in missing.problems[0]


def test_rank_limit(adapter_dir: Path, model_dir: str) -> None:
    report = run_check(adapter_dir, model_dir, max_rank=3)
    assert not report.ok
    assert "--max-lora-rank" in report.problems[0]


def test_no_such_model(adapter_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        run_check(adapter_dir, str(tmp_path / "nowhere"))
