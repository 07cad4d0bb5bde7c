"""Quantised linears: which ones, from which tensors, at what cost, and refusals."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.cpu_workers.kernels.simd.isa import has_integer_dot
from corun.gpu.forward.batch import StepContext
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.quantized import quantize
from corun.gpu.linear.quantized_linear import QuantizedLinear
from corun.gpu.linear.wrapper import CorunLinear, wrap_linears
from corun.gpu.model import quantization, quantization_plan
from corun.gpu.model.attention_hook import PagedAttentionHook
from corun.gpu.model.fingerprint import model_fingerprint
from corun.gpu.model.quantization import QuantizedLinears, Weights
from corun.gpu.model.quantization_plan import Quantization, check_dtype, plan_quantization
from corun.gpu.model.source import ModelSource, load_config
from corun.gpu.model.stored_quantization import StoredQuantization
from corun.gpu.model.weight_files import WeightFiles
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ConfigError, ModelError
from safetensors.torch import load_file, save_file
from support.architectures import save_model
from support.four_bit import four_bit_config, store_in_four_bits
from support.stored_formats import store_in
from transformers import PreTrainedModel

CPU = torch.device("cpu")
INT8 = Quantization(8, 8, None)
W8A8 = Quantization(8, 8, None, is_w8a8=True)
PLAIN_CONFIG = SimpleNamespace()


def gptq_config(bits: int = 4) -> SimpleNamespace:
    return SimpleNamespace(quantization_config={"quant_method": "gptq", "bits": bits, "group_size": 64})


def nf4_config() -> SimpleNamespace:
    return SimpleNamespace(quantization_config=four_bit_config())


def plan(config: Any = PLAIN_CONFIG, **options: Any) -> Quantization | None:
    config_of = EngineConfig(**{"device": "cpu", **options})
    return plan_quantization(config_of, config, torch.device(config_of.device))


def load(model: Path, planned: Quantization, kept: Path | None = None) -> tuple[PreTrainedModel, Weights]:
    """The model with its linears replaced, as an engine does it."""
    source, context = ModelSource(str(model)), StepContext()
    linears = QuantizedLinears(source, load_config(source), planned, kept)
    hook = PagedAttentionHook(context)
    try:
        made = linears.load_rest(torch.bfloat16, CPU, hook.name)
    finally:
        hook.close()
    sizes = {name: p.numel() * p.element_size() for name, p in made.named_parameters()}
    wrap_linears(made, context, NumbaLinear, {}, {}, linears.make)
    weights = linears.finish(sizes)
    if weights.late is not None:
        weights.late.begin(lambda: False)
        weights.late.close()
    return made, weights


def backends(model: PreTrainedModel) -> dict[str, Any]:
    return {path: module.backend for path, module in model.named_modules() if isinstance(module, CorunLinear)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model("llama3-rope", tmp_path / "model")


def test_nothing_is_quantised_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan() is None
    assert plan(quantization="int4") == Quantization(4, 8, None)
    assert plan(quantization="int4", lm_head_quantization="int4") == Quantization(4, 4, None)
    assert plan(quantization="int8", lm_head_quantization="off") == Quantization(8, None, None)
    monkeypatch.setattr(quantization_plan, "has_integer_dot", lambda: True)
    assert plan(quantization="w8a8") == W8A8
    monkeypatch.setattr(quantization_plan, "has_integer_dot", lambda: False)
    with pytest.raises(ConfigError, match=r"products of bytes .* use int8"):
        plan(quantization="w8a8")
    stored = plan(gptq_config())
    assert stored is not None and stored.bits is None and stored.head_bits is None
    assert plan(gptq_config(), quantization="int4") == stored


def test_nf4_is_kept_in_bfloat16_on_the_cpu() -> None:
    """Otherwise its matrices are full ones, of which integers are made if they are asked for."""
    stored = StoredQuantization("bitsandbytes", levels="nf4")
    for dtype in ("auto", "bfloat16"):
        assert plan(nf4_config(), dtype=dtype) == Quantization(None, None, stored, keeps_levels=True)
    for options in ({"dtype": "float32"}, {"quantization": "off"}):
        assert plan(nf4_config(), **options) == Quantization(None, None, stored)
    assert plan(nf4_config(), quantization="int4") == Quantization(4, 8, stored)
    assert plan(nf4_config(), lm_head_quantization="int8") == Quantization(None, 8, stored, keeps_levels=True)


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (PLAIN_CONFIG, {"lm_head_quantization": "int8"}, "needs --quantization"),
        (PLAIN_CONFIG, {"quantization": "int8", "device": "cuda"}, "only on the CPU"),
        (
            gptq_config(),
            {"device": "cuda", "lm_head_quantization": "int4", "quantization": "off"},
            "--lm-head-quantization int4 is supported only on the CPU",
        ),
        (
            nf4_config(),
            {"quantization": "int8", "device": "cuda"},
            "--quantization int8 is supported only on the CPU",
        ),
        (
            nf4_config(),
            {"lm_head_quantization": "int8", "device": "cuda"},
            "--lm-head-quantization int8 is supported only on the CPU",
        ),
        (gptq_config(8), {"quantization": "int4"}, "is int4, but the checkpoint is already in int8"),
    ],
)
def test_options_that_contradict_are_refused(config: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(config, **options)


def test_products_are_of_bfloat16_unless_another_type_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert check_dtype(torch.float16, INT8, is_chosen=False) == torch.bfloat16
    assert check_dtype(torch.bfloat16, INT8, is_chosen=True) == torch.bfloat16
    nf4 = Quantization(None, None, StoredQuantization("bitsandbytes"))
    assert check_dtype(torch.float32, nf4, is_chosen=False) == torch.bfloat16
    assert check_dtype(torch.float32, nf4, is_chosen=True) == torch.float32
    assert "slower" not in caplog.text
    assert check_dtype(torch.float32, INT8, is_chosen=True) == torch.float32
    assert "--dtype float32 with quantised weights" in caplog.text
    assert "many times slower" in caplog.text


def test_kv_of_other_bits_has_another_name(model: Path) -> None:
    source = ModelSource(str(model))
    config = load_config(source)
    planned = (INT8, W8A8, Quantization(4, 8, None), Quantization(8, None, None))
    labels = {"", *(each.label for each in planned)}
    assert len({model_fingerprint(source, config, label) for label in labels}) == 5


@pytest.mark.parametrize("name", ["llama3-rope", "gemma2", "mixtral"])
def test_linears_hold_what_their_checkpoint_comes_to(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Embeddings, norms, experts, and linears of 96 inputs stay as they are."""
    directory = save_model(name, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    made, weights = load(directory, INT8)
    for path, backend in backends(made).items():
        full = tensors.get(f"{path}.weight", tensors["model.embed_tokens.weight"])
        if full.shape[1] % 64:
            assert isinstance(backend, NumbaLinear)
            assert path in caplog.text
            assert torch.equal(backend.weight, full.bfloat16())
            continue
        assert isinstance(backend, QuantizedLinear)
        expected = quantize(full, 8)
        found = backend.packed.unpacked()
        assert (found.codes == expected.codes).all() and (found.scales == expected.scales).all()
    embedding = made.get_input_embeddings().weight
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].bfloat16())
    assert 0 < weights.quantized_bytes < weights.num_bytes


def test_the_head_stays_by_choice(model: Path) -> None:
    made, weights = load(model, Quantization(4, None, None))
    found = backends(made)
    assert isinstance(found["lm_head"], NumbaLinear)
    assert found["model.layers.0.self_attn.q_proj"].name == "int4"
    assert weights.kind == "int4, head in full"


@pytest.mark.parametrize(
    "planned", [INT8, pytest.param(W8A8, marks=pytest.mark.skipif(not has_integer_dot(), reason="no VNNI"))]
)
def test_a_second_start_reads_what_the_first_has_made(
    planned: Quantization, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    first, weights = load(model, planned, kept)
    assert weights.kind == ("w8a8" if planned.is_w8a8 else "int8")
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "quantize_into", None)  # nothing is made
        second, _ = load(model, planned, kept)
    for path, backend in backends(first).items():
        assert torch.equal(backend.weight, backends(second)[path].weight)
        assert backend.name == backends(second)[path].name
    load(model, Quantization(4, 8, None), kept)
    assert len(list(kept.glob("*.weights"))) == 2


def test_a_copy_of_the_checkpoint_is_the_same_content(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    load(model, INT8, kept)
    load(model.rename(tmp_path / "moved"), INT8, kept)
    assert len(list(kept.glob("*.weights"))) == 1


def test_a_damaged_file_is_made_again(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    first, _ = load(model, INT8, kept)
    (path,) = kept.glob("*.weights")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 300] = bytes(300)
    path.write_bytes(content)
    second, _ = load(model, INT8, kept)
    assert "is damaged and will be made again" in caplog.text
    for name, backend in backends(first).items():
        assert torch.equal(backend.weight, backends(second)[name].weight)
    caplog.clear()
    load(model, INT8, kept)
    assert "damaged" not in caplog.text


def test_a_change_in_any_part_of_a_large_file_is_other_content(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(65 << 20, dtype=torch.uint8)}, file)  # read in two parts
    files = WeightFiles(ModelSource(str(tmp_path)))
    digests = [files.digest(num_threads=1), files.digest(num_threads=2)]
    assert digests[0] == digests[1]
    for position in (file.stat().st_size - 1, 1 << 20):
        with file.open("r+b") as opened:
            opened.seek(position)
            opened.write(b"1")
        digests.append(files.digest(num_threads=2))
    assert len(set(digests)) == 3


def test_checkpoints_in_other_content_are_other_files(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    load(model, INT8, kept)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    made, _ = load(model, INT8, kept)
    expected = quantize(tensors["lm_head.weight"], 8)
    assert (backends(made)["lm_head"].packed.unpacked().scales == expected.scales).all()


def test_weights_that_are_not_finite_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"k_proj\.weight of .* cannot be quantised: .*finite"):
        load(model, INT8)


def test_a_wrong_product_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = QuantizedLinear.__call__
    monkeypatch.setattr(QuantizedLinear, "__call__", lambda self, x: call(self, x).roll(1, -1))
    with pytest.raises(ModelError, match="is wrong on this machine"):
        load(model, INT8)


def store_as_integers(directory: Path, field: str = "quantization_config") -> dict[str, torch.Tensor]:
    """Make a checkpoint of compressed-tensors of one; returns its dequantised matrices.

    ``field``: of config.json, under which the method describes itself.
    """
    file = directory / "model.safetensors"
    dense, tensors = {}, load_file(file)
    for name, tensor in list(tensors.items()):
        if name.endswith("proj.weight") and tensor.shape[1] % 64 == 0:
            path = name.removesuffix(".weight")
            scales = tensor.abs().amax(dim=1, keepdim=True) / 127
            codes = (tensor / scales).round()
            tensors[name] = codes.to(torch.int8)
            tensors[f"{path}.weight_scale"] = scales
            dense[path] = codes * scales
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config[field] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return dense


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantised_checkpoint_is_taken_as_it_is(model: Path, tmp_path: Path, field: str) -> None:
    dense = store_as_integers(model, field)
    config = load_config(ModelSource(str(model)))
    planned = plan(config)
    assert planned is not None
    for _ in range(2):  # from the checkpoint, and from what is kept
        made, weights = load(model, planned, tmp_path / "kept")
        found = backends(made)
        assert {path for path, one in found.items() if one.name == "int8"} == dense.keys()
        for path, matrix in dense.items():
            dequantised = torch.from_numpy(found[path].packed.unpacked().dequantized())
            torch.testing.assert_close(dequantised, matrix)
        assert weights.kind == "int8"


def test_inputs_in_8_bits_need_groups_of_64(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization_plan, "has_integer_dot", lambda: True)
    stored = store_in("gptq act-order, 8 bits", model, tmp_path / "stored")
    planned = plan(load_config(ModelSource(str(stored))), quantization="w8a8")
    assert planned is not None
    with pytest.raises(ModelError, match=r"w8a8 needs weights in groups of 64, but .* groups of 32"):
        load(stored, planned)


@pytest.mark.parametrize(
    ("form", "name"), [("gptq act-order", "int4/32"), ("awq", "int4/32"), ("compressed mxfp4", "mxfp4")]
)
def test_groups_of_32_are_served_as_stored(model: Path, tmp_path: Path, form: str, name: str) -> None:
    """Also inputs of 96; from the checkpoint, and from what is kept."""
    stored = store_in(form, model, tmp_path / "stored")
    planned = plan(load_config(ModelSource(str(stored))))
    assert planned is not None
    dense = load_file(model / "model.safetensors")
    for _ in range(2):
        made, weights = load(stored, planned, tmp_path / "kept")
        found = backends(made)
        assert {path for path, one in found.items() if one.name == name} == {
            path for path in found if "layers" in path
        }
        for path, backend in found.items():
            assert torch.equal(backend.weight, dense[f"{path}.weight"].bfloat16())
        assert weights.kind == name.removesuffix("/32")


def test_scales_that_float16_does_not_have(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same values in 8 bits; from the checkpoint, and from what is kept."""
    stored = store_in("compressed int4", model, tmp_path / "stored")
    file = stored / "model.safetensors"
    scaled = {name: one / 3 if name.endswith("_scale") else one for name, one in load_file(file).items()}
    save_file(scaled, file, metadata={"format": "pt"})
    planned = plan(load_config(ModelSource(str(stored))))
    assert planned is not None
    dense = load_file(model / "model.safetensors")
    for _ in range(2):
        caplog.clear()
        made, _ = load(stored, planned, tmp_path / "kept")
        assert "14 linears are stored in 8 bits instead of 4" in caplog.text
        for path, backend in backends(made).items():
            if "layers" in path:
                assert backend.name == "int8/32"
                torch.testing.assert_close(
                    3 * backend.weight.float(), dense[f"{path}.weight"], rtol=2**-8, atol=0
                )


def test_a_checkpoint_in_nf4_is_read_in_full(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    four_bit = store_in_four_bits(model, tmp_path / "nf4")
    caplog.set_level(logging.INFO)
    planned = plan(load_config(ModelSource(str(four_bit))), quantization="off")
    assert planned is not None
    made, weights = load(four_bit, planned, tmp_path / "kept")
    assert "14 matrices of the checkpoint are quantised (bitsandbytes); 14 of them are read" in caplog.text
    dense = load_file(model / "model.safetensors")
    for path, backend in backends(made).items():
        assert torch.equal(backend.weight, dense[f"{path}.weight"])
    sizes = sum(tensor.nbytes for tensor in dense.values())
    assert weights == Weights(sizes, 0, "", planned.label)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("nested", [True, False])
def test_nf4_is_served_as_stored(
    model: Path, tmp_path: Path, nested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Linears of 96 inputs are read in full: a block of 64 has weights of two rows."""
    caplog.set_level(logging.INFO)
    four_bit = store_in_four_bits(model, tmp_path / "nf4", nested=nested)
    planned = plan(load_config(ModelSource(str(four_bit))))
    assert planned is not None
    dense = load_file(model / "model.safetensors")
    for _ in range(2):  # from the checkpoint, and from what is kept
        made, weights = load(four_bit, planned, tmp_path / "kept")
        found = backends(made)
        kept = {path for path, one in found.items() if one.name == "nf4"}
        assert kept == {path for path in found if "layers" in path and "down_proj" not in path}
        for path, backend in found.items():
            assert torch.equal(backend.weight, dense[f"{path}.weight"])
        assert weights.kind == "nf4"
    assert "14 matrices of the checkpoint are quantised (bitsandbytes); 2 of them" in caplog.text
    path = "model.layers.0.self_attn.q_proj"
    stored = load_file(four_bit / "model.safetensors")
    parts = ("", ".absmax", ".nested_absmax") if nested else ("", ".absmax")
    stored_bytes = sum(stored[f"{path}.weight{part}"].nbytes for part in parts)
    assert found[path].packed.blocks.nbytes < 1.1 * stored_bytes


def test_a_checkpoint_in_fp4_is_read_in_full(model: Path, tmp_path: Path) -> None:
    four_bit = store_in_four_bits(model, tmp_path / "fp4", kind="fp4")
    planned = plan(load_config(ModelSource(str(four_bit))))
    assert planned is not None
    made, weights = load(four_bit, planned)
    assert {one.name for one in backends(made).values()} == {"numba"}
    assert (weights.kind, weights.quantized_bytes) == ("", 0)


def test_integers_are_made_of_nf4(model: Path, tmp_path: Path) -> None:
    four_bit = store_in_four_bits(model, tmp_path / "nf4")
    planned = plan(load_config(ModelSource(str(four_bit))), quantization="int4")
    assert planned is not None
    dense = load_file(model / "model.safetensors")
    for _ in range(2):  # from the checkpoint, and from what is kept
        made, weights = load(four_bit, planned, tmp_path / "kept")
        for path, backend in backends(made).items():
            if isinstance(backend, QuantizedLinear):
                found = backend.packed.unpacked()
                expected = quantize(dense[f"{path}.weight"], found.bits)
                assert (found.codes == expected.codes).all()
        assert weights.kind == "int4, head int8"


def test_a_checkpoint_that_only_says_that_it_is_quantised_is_named(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": four_bit_config()}
    file.write_text(json.dumps(config))
    planned = plan(load_config(ModelSource(str(model))))
    assert planned is not None
    load(model, planned)
    assert "quantised (bitsandbytes), but no tensor is; the weights are served as" in caplog.text


def test_another_size_than_that_of_the_model_is_refused(model: Path) -> None:
    store_as_integers(model)
    file = model / "config.json"
    config = json.loads(file.read_text()) | {"num_key_value_heads": 1}
    file.write_text(json.dumps(config))
    planned = plan(load_config(ModelSource(str(model))))
    assert planned is not None
    with pytest.raises(ModelError, match=r"k_proj\.weight of .* is \[\d+, 64\], but config\.json"):
        load(model, planned)


def test_a_bias_that_would_be_lost_is_refused(model: Path) -> None:
    store_as_integers(model)
    file = model / "model.safetensors"
    tensors = load_file(file)
    planned = plan(load_config(ModelSource(str(model))))
    assert planned is not None
    for value in (0.0, 1.0):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.full((64,), value)
        save_file(tensors, file, metadata={"format": "pt"})
        if value == 0:
            load(model, planned)
    with pytest.raises(ModelError, match="the model has no such bias"):
        load(model, planned)


@pytest.mark.parametrize(
    ("mode", "max_weight_mib"), [pytest.param("int8", 67, marks=pytest.mark.full), ("nf4", 113)]
)
def test_a_start_needs_little_more_than_what_it_leaves(
    mode: str, max_weight_mib: int, tmp_path: Path
) -> None:
    """A float32 checkpoint of 200 MiB, in another process, to measure its peak."""
    script = Path(__file__).parents[2] / "support" / "quantized_start.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), mode, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    weight_bytes, grown_bytes = map(int, done.stdout.split())
    assert weight_bytes < max_weight_mib * 2**20
    # Beside it a matrix on its way, and what the libraries take; all of it in bfloat16 are 100 MiB.
    assert grown_bytes < weight_bytes + 96 * 2**20
