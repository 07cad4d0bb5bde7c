"""Loading a model: missing files and weights are reported, never made up."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.forward.batch import StepContext
from corun.gpu.model.attention_hook import PagedAttentionHook
from corun.gpu.model.generation import GenerationDefaults, read_generation_defaults
from corun.gpu.model.load import load_model, resolve_device
from corun.gpu.model.source import ModelSource, load_config, way_to_full_weights
from corun.gpu.model.weight_files import WeightFiles
from corun.runtime.errors import ConfigError, ModelError
from safetensors.torch import load_file, save_file
from support.architectures import make_model, save_model
from support.peft_adapters import save_adapter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import peft as peft_integration
from transformers.models.auto import auto_factory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model("llama3-rope", tmp_path)


def load(directory: Path | str) -> Any:
    source = ModelSource(str(directory))
    hook = PagedAttentionHook(StepContext())
    try:
        config = load_config(source)
        return load_model(source, config, torch.float32, torch.device("cpu"), hook.name)
    finally:
        hook.close()


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def defaults(directory: Path, eos_id: int | None = None) -> GenerationDefaults:
    source = ModelSource(str(directory))
    return read_generation_defaults(source, load_config(source).get_text_config(), eos_id)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_weights_that_are_missing_are_named(directory: Path, name: str) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lack {name}"):
        load(directory)


def test_weights_of_another_size_are_named(directory: Path) -> None:
    edit(directory / "config.json", intermediate_size=128)
    with pytest.raises(ModelError, match=r"down_proj\.weight of .* is \[64, 96\], but .*\[64, 128\]"):
        load(directory)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    model = load(save_model("gemma2", tmp_path))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_shards(tmp_path: Path) -> None:
    make_model("llama3-rope").save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    load(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load(tmp_path)


def drop_fields(file: Path, *names: str) -> None:
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({name: fields[name] for name in fields if name not in names}))


def rewrite_weights(directory: Path, change: Callable[[str, torch.Tensor], tuple[str, Any]]) -> None:
    file = directory / "model.safetensors"
    weights = dict(change(*item) for item in load_file(file).items())
    save_file(weights, file, metadata={"format": "pt"})


def leave_other_files(directory: Path) -> None:
    """Older formats of other weights, as published directories have them."""
    save_file({"tok_embeddings.weight": torch.zeros(4, 4)}, directory / "consolidated.safetensors")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("{}")
    weights = load_file(directory / "model.safetensors")
    stale = {name: 3 * weight for name, weight in weights.items()}
    torch.save(stale, directory / "pytorch_model.bin")


def write_old_fields(directory: Path) -> None:
    """As transformers before release 5 wrote configurations."""
    file = directory / "config.json"
    drop_fields(file, "dtype", "rope_parameters")
    edit(
        file,
        torch_dtype="float32",
        transformers_version="4.30.0",
        rope_theta=10000.0,
        rope_scaling=None,
        pretraining_tp=1,
        use_cache=False,
    )


def become_links(directory: Path) -> None:
    """As in the hub's cache: names in a snapshot, files by their digests elsewhere."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))


DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "other weights beside them": leave_other_files,
    "old fields": write_old_fields,
    "no architectures": lambda one: drop_fields(one / "config.json", "architectures"),
    "half precision": lambda one: rewrite_weights(one, lambda name, w: (name, w.half())),
    "no prefix": lambda one: rewrite_weights(one, lambda name, w: (name.removeprefix("model."), w)),
    "tied, with a head of its own": lambda one: edit(one / "config.json", tie_word_embeddings=True),
    "links": become_links,
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_directories_as_people_have_them(kind: str, tmp_path: Path) -> None:
    """All weights are those that transformers loads."""
    directory = save_model("llama3-rope", tmp_path / "model")
    DIRECTORIES[kind](directory)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = load(directory)
    assert dict(model.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.parametrize("content", [b"", b"\x40\0\0\0\0\0\0\0{"])
def test_damaged_weights(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot load"):
        load(directory)


def test_pickled_weights_are_refused_by_name(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which corun does not load"):
        load(directory)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (directory / "pytorch_model.bin").rename(directory / "pytorch_model-00001-of-00001.bin")
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"pytorch_model.*, which corun does not load"):
        load(directory)


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        (["m.gguf"], "m.gguf", "m.gguf' is a GGUF file"),
        (["m.GGUF"], "m.GGUF", "m.GGUF' is a GGUF file"),
        (["m.gguf", "README.md"], ".", "holds m.gguf, a GGUF file"),
        (["m.gguf", "config.json"], ".", "holds m.gguf, a GGUF file"),
    ],
)
def test_gguf_is_refused_with_what_to_do(files: list[str], path: str, expected: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelError) as refusal:
        load(tmp_path / path)
    assert expected in str(refusal.value)
    assert "does not read; serve the full model in safetensors" in str(refusal.value)
    assert "--quantization int4 takes about as little memory" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "card", "expected"),
    [
        ("Llama-3.1-8B-Instruct-FP8", None, "Llama-3.1-8B-Instruct"),
        ("Qwen3-4B-unsloth-bnb-4bit", None, "Qwen3-4B"),
        ("Qwen2.5-7B-Instruct-GPTQ-Int4", None, "Qwen2.5-7B-Instruct"),
        ("Mistral-7B-v0.3-AWQ", "---\nlicense: mit\n---\n", "Mistral-7B-v0.3"),
        ("mine", "---\nbase_model: Qwen/Qwen3-4B\n---\n", "Qwen/Qwen3-4B"),
        ("mine", "---\nbase_model:\n- Qwen/Qwen3-4B\n---\n", "Qwen/Qwen3-4B"),
        ("llama.Q4_K_M.gguf", None, "llama"),
        ("mine", None, None),
    ],
)
def test_the_model_that_a_quantised_one_was_made_from(
    name: str, card: str | None, expected: str | None, tmp_path: Path
) -> None:
    path = tmp_path / name
    if not name.endswith(".gguf"):
        path.mkdir()
    if card is not None:
        (path / "README.md").write_text(card)
    named = "that it was made from" if expected is None else f"that it was made from, {expected}"
    assert f"{named}; --quantization int4" in way_to_full_weights(str(path))


def test_gguf_beside_safetensors_is_ignored(directory: Path) -> None:
    (directory / "m.gguf").write_bytes(b"GGUF")
    load(directory)


def test_files_and_adapters_are_no_models(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file; a model is a directory"):
        load(file)
    save_adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match="it holds an adapter: name its base model as --model"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize("model_type", ["t5", "vit", "clip"])
def test_types_that_write_no_text_are_refused_shortly(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="neither a causal") as refusal:
        load(tmp_path)
    assert len(str(refusal.value)) - len(str(tmp_path)) <= 250


@pytest.mark.parametrize("fields", [{"num_hidden_layers": "two"}, {"vocab_size": None}])
def test_damaged_configurations(directory: Path, fields: dict[str, Any]) -> None:
    edit(directory / "config.json", **fields)
    with pytest.raises(ModelError, match=next(iter(fields))):
        load(directory)


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model"])
def test_a_name_that_is_neither_a_directory_nor_in_the_cache(name: str) -> None:
    with pytest.raises(ModelError, match=rf"'{name}'.*(\n.*)*no directory of this name"):
        load(name)


@pytest.mark.parametrize("is_peft_there", [True, False])
def test_an_adapter_beside_the_weights_is_not_applied(
    directory: Path, is_peft_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers applies it where PEFT can be imported, and only there."""
    for module in (auto_factory, peft_integration):
        monkeypatch.setattr(module, "is_peft_available", lambda: is_peft_there)
    plain = load(directory)
    assert "also holds an adapter" not in caplog.text
    save_adapter(directory, target_modules=["q_proj", "v_proj"])
    model = load(directory)
    assert dict(model.named_modules()).keys() == dict(plain.named_modules()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    expected = f"{directory} also holds an adapter (adapter_config.json). The base is served"
    assert expected in caplog.text
    assert f"--lora-modules NAME={directory}" in caplog.text


def test_an_adapter_of_another_width_beside_the_weights(directory: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "other", "odd-heads", target_modules=["dense"])
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "other" / name, directory)
    load(directory)


class NotingSlice:
    """A tensor in a file that notes when it is read."""

    def __init__(self, name: str, part: Any, read: set[str]) -> None:
        self._name, self._part, self._read = name, part, read

    def __getitem__(self, where: Any) -> torch.Tensor:
        self._read.add(self._name)
        tensor: torch.Tensor = self._part[where]
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mistral3", "llava", "internvl"])
def test_weights_that_text_never_meets_are_not_read(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    lazily = WeightFiles.lazily

    @contextmanager
    def noting(files: WeightFiles, names: Any) -> Iterator[dict[str, Any]]:
        with lazily(files, names) as tensors:
            yield {name: NotingSlice(name, part, read) for name, part in tensors.items()}

    monkeypatch.setattr(WeightFiles, "lazily", noting)
    whole = make_model(model_type)
    whole.save_pretrained(tmp_path)
    model = load(tmp_path)
    text = {
        name: one
        for name, one in whole.named_parameters()
        if name.startswith(("model.language_model.", "lm_head."))
    }
    assert dict(model.named_parameters()).keys() == text.keys()
    assert all(torch.equal(model.get_parameter(name), one) for name, one in text.items())
    in_files = WeightFiles(ModelSource(str(tmp_path))).names
    assert len(read) == len(text) < len(in_files)
    assert not any("vis" in name or "projector" in name for name in read)


def test_layers_of_an_inner_configuration_are_looked_at(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    AutoConfig.for_model("llama4", text_config=text).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="layers of type linear_attention"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, GenerationDefaults((2,), {})),
        ({"eos_token_id": [2, 5]}, GenerationDefaults((2, 5), {})),
        ({"eos_token_id": None}, GenerationDefaults((2,), {})),  # as config.json says
        ({"eos_token_id": []}, GenerationDefaults((), {})),
        ({"temperature": 0.7, "do_sample": False}, GenerationDefaults((2,), {"temperature": 0.0})),
        (
            {"temperature": 0.7, "top_k": 50, "do_sample": True},
            GenerationDefaults((2,), {"temperature": 0.7, "top_k": 50}),
        ),
    ],
)
def test_generation_defaults(directory: Path, stated: dict[str, Any], expected: GenerationDefaults) -> None:
    (directory / "generation_config.json").write_text(json.dumps(stated))
    assert defaults(directory) == expected


def test_generation_defaults_without_a_file(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert defaults(directory) == GenerationDefaults((2,), {})


def test_defaults_that_no_request_may_have_are_left_out(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "generation_config.json").write_text('{"top_p": 0.0, "temperature": 0.5}')
    assert defaults(directory) == GenerationDefaults((2,), {"temperature": 0.5})
    assert "top_p is 0.0" in caplog.text


def test_settings_that_are_not_applied_are_named(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    stated = {
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [5],
        "bad_words_ids": [[7]],
        "num_beams": 4,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": None,
        "begin_suppress_tokens": [],
        "guidance_scale": 1.0,
        "min_length": 0,
        "typical_p": 1,
        "max_length": 4096,
    }
    (directory / "generation_config.json").write_text(json.dumps(stated))
    assert defaults(directory) == GenerationDefaults((2,), {})
    assert "bad_words_ids, forced_bos_token_id, no_repeat_ngram_size, num_beams, suppress_tokens;" in (
        caplog.text
    )
    caplog.clear()
    (directory / "generation_config.json").write_text('{"min_length": 0, "max_length": 4096}')
    defaults(directory)
    assert not caplog.text


def test_the_end_token_of_the_tokenizer_is_one_more(directory: Path) -> None:
    assert defaults(directory, 2).eos_token_ids == (2,)
    assert defaults(directory, 7).eos_token_ids == (2, 7)
    edit(directory / "generation_config.json", eos_token_id=[])
    assert defaults(directory, 7).eos_token_ids == (7,)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}'])
def test_damaged_generation_defaults(directory: Path, content: str) -> None:
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json|eos_token_id"):
        defaults(directory)


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda:0: PyTorch sees no CUDA device here"):
        resolve_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="--device cuda:2: PyTorch sees 2 CUDA devices here"):
        resolve_device("cuda:2")
