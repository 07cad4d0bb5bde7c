"""The allow-list of configuration fields."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
from corun.runtime.adapters.lora_spec import LoraSpec
from corun.runtime.adapters.peft_config import (
    IGNORED_FIELDS,
    PEFT_DEFAULTS,
    PEFT_VERSION,
    REFUSAL_REASONS,
    SERVED_FIELDS,
    TASK_TYPES,
    parse_peft_config,
    read_peft_config,
)
from corun.runtime.errors import AdapterError
from hypothesis import given
from hypothesis import strategies as st
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
)
from support.damage import JSON_VALUES, damaged, few_and_many

_PATH = Path("some/adapter_config.json")
_MINIMAL = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def parse(**fields: Any) -> Any:
    return parse_peft_config({**_MINIMAL, **fields}, _PATH)


def test_minimal_configuration() -> None:
    spec = parse()
    assert (spec.r, spec.lora_alpha, spec.use_rslora) == (8, 16.0, False)
    assert spec.target_modules == ("q_proj",)
    assert spec.base_model_name_or_path is None
    assert spec.layers_to_transform is None


def test_configuration_of_the_installed_peft_is_accepted(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    config.save_pretrained(str(tmp_path))
    spec = read_peft_config(tmp_path)
    assert spec.r == 4
    assert spec.target_modules == ("q_proj",)


def test_every_field_of_the_installed_peft_is_known() -> None:
    """A new field of PEFT is refused when it is set; this test finds new fields."""
    names = {field.name for field in dataclasses.fields(LoraConfig)}
    assert names - SERVED_FIELDS - IGNORED_FIELDS - set(REFUSAL_REASONS) == set()


def test_a_gguf_adapter_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    for _ in range(2):
        with pytest.raises(AdapterError, match="does not read; give the directory of the PEFT"):
            read_peft_config(path)
        path.touch()


@pytest.mark.parametrize("value", [None, False, True])
def test_how_the_base_keeps_its_weights_is_not_asked(value: bool | None) -> None:
    """PEFT itself uses the class of the module, and warns if the field differs."""
    assert parse(fan_in_fan_out=value) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("lora_bias", True),
        ("trainable_token_indices", 1),
        ("trainable_token_indices", [True]),
        ("trainable_token_indices", [1.5]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", [2**31]),
        ("trainable_token_indices", [3, 5, 3]),
        ("trainable_token_indices", {"embed_tokens": [3, 3]}),
        ("trainable_token_indices", {"embed_tokens": 3}),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 4]]),
        ("megatron_config", {"a": 1}),
        ("arrow_config", {"top_k": 3}),
        ("velora_config", {"x": 1}),
        ("kasa_config", {"x": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("ensure_weight_tying", 1),
        ("a_field_of_the_future", 1),
        ("a_field_of_the_future", 0),
        ("a_field_of_the_future", "on"),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("peft_type", "IA3"),
        ("task_type", "IMAGE_CLASSIFICATION"),
        ("qalora_group_sizes", 16),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "an_init_of_the_future"),
    ],
)
def test_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(AdapterError) as caught:
        parse(**{field: value})
    message = str(caught.value)
    assert str(_PATH) in message
    assert f"{field}={value!r}" in message


def test_the_table_of_defaults_is_that_of_the_installed_peft(tmp_path: Path) -> None:
    LoraConfig().save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved.pop("peft_version") == PEFT_VERSION == peft.__version__
    # Saving sets whether it is for inference.
    assert saved | {"inference_mode": False} == PEFT_DEFAULTS
    assert set(TASK_TYPES) == {task.value for task in TaskType}


def test_every_field_may_have_the_default_of_peft() -> None:
    given = {name: value for name, value in PEFT_DEFAULTS.items() if value is not None}
    assert parse(**given | {"target_modules": ["q_proj"]}).r == 8


@pytest.mark.parametrize("task", TASK_TYPES)
def test_what_an_adapter_was_trained_for_changes_nothing(task: str) -> None:
    assert parse(task_type=task) == parse()


@pytest.mark.parametrize(
    "config",
    [
        LoHaConfig(),
        IA3Config(),
        OFTConfig(),
        VeraConfig(),
        AdaLoraConfig(total_step=9),
        PromptTuningConfig(task_type="CAUSAL_LM"),
        PrefixTuningConfig(task_type="CAUSAL_LM"),
    ],
)
def test_other_kinds_of_adapters_are_named(config: PeftConfig, tmp_path: Path) -> None:
    config.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError) as caught:
        read_peft_config(tmp_path)
    kind = f"peft_type={config.peft_type.value!r} is refused"
    assert f"{kind}: corun serves only LoRA adapters (LORA)" in str(caught.value)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_at_a_neutral_value_is_accepted(value: object) -> None:
    parse(a_field_of_the_future=value)


@pytest.mark.parametrize("value", [None, True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_keep_the_base_are_accepted(value: object) -> None:
    parse(init_lora_weights=value)


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0},
        {"r": -1},
        {"r": 8.0},
        {"r": True},
        {"r": "8"},
        {"r": None},
        {"lora_alpha": None},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"use_rslora": 1},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": [1]},
        {"rank_pattern": {"(": 2}},
        {"alpha_pattern": {"q_proj": "x"}},
        {"alpha_pattern": {"q_proj": float("inf")}},
        {"alpha_pattern": {"q_proj": 1e39}},
        {"lora_alpha": -(10**400)},
        {"target_modules": None},
        {"target_modules": []},
        {"target_modules": [1]},
        {"target_modules": "("},
        {"exclude_modules": 3},
        {"exclude_modules": "*"},
        {"layers_to_transform": "1"},
        {"layers_to_transform": [1.5]},
        {"layers_pattern": "layers"},  # needs layers_to_transform
        {"layers_pattern": ["("], "layers_to_transform": [0]},
        {"layers_pattern": [")("], "layers_to_transform": [0]},
        {"target_modules": "[[:alpha:]]*"},
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        {"base_model_name_or_path": 3},
    ],
)
def test_wrong_values_name_a_field(fields: dict[str, object]) -> None:
    with pytest.raises(AdapterError) as caught:
        parse(**fields)
    message = str(caught.value)
    assert str(_PATH) in message
    assert any(field in message for field in fields)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 200_000, "not valid JSON"),
        (b" " * (5 << 20), "larger than"),
        (json.dumps({"peft_type": "LORA", "r": 8}).encode(), "lora_alpha is missing"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, needle: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match=needle):
        read_peft_config(tmp_path)


def test_missing_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such adapter directory"):
        read_peft_config(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match=r"holds no adapter_config.json"):
        read_peft_config(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="is not a directory; give the directory with"):
        read_peft_config(tmp_path / "file")


def test_a_path_that_is_too_long_is_not_told_back() -> None:
    with pytest.raises(AdapterError, match="too long") as info:
        read_peft_config(Path("x" * 10_000))
    assert len(str(info.value)) < 300


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(AdapterError) as caught:
        parse(trainable_token_indices=["m" * 10_000])
    assert len(str(caught.value)) < 500


NUM_CASES = [200, pytest.param(5_000, marks=pytest.mark.full)]
PATHS = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head", "")


def use(spec: LoraSpec) -> None:
    """Read what the loader reads. A pattern may take too long, which the loader reports."""
    json.dumps(spec.effective_fields())
    for path in PATHS:
        with contextlib.suppress(TimeoutError):
            assert spec.targets(path) in (True, False)
            assert 1 <= spec.rank(path) < 2**31
            assert math.isfinite(spec.scaling(path))


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_a_damaged_file_is_a_configuration_or_refused(tmp_path: Path, num_cases: int) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"layers.1.*": 8})
    config.save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"
    genuine = path.read_bytes()

    @few_and_many(num_cases)
    @given(data=damaged(genuine))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            spec = read_peft_config(tmp_path)
        except AdapterError:
            return
        assert spec.r == json.loads(data)["r"]
        use(spec)

    check()


_PATTERNS = st.text("ab.*+?()[]{}|^$\\d1,", max_size=12) | st.sampled_from(
    ["(a|a)*b", "(.*)*$", "q_proj", "(?P<layer>x)", "(?i)q", r"\1", "(", "a{9999}{9999}", ".*"]
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "r": st.integers(-1, 300) | JSON_VALUES,
        "lora_alpha": st.integers() | st.floats() | JSON_VALUES,
        "use_rslora": JSON_VALUES,
        "target_modules": _PATTERNS | st.lists(_PATTERNS, max_size=3) | JSON_VALUES,
        "exclude_modules": _PATTERNS | st.lists(_PATTERNS, max_size=3) | JSON_VALUES,
        "rank_pattern": st.dictionaries(_PATTERNS, st.integers() | JSON_VALUES, max_size=3),
        "alpha_pattern": st.dictionaries(_PATTERNS, st.floats() | JSON_VALUES, max_size=3),
        "layers_to_transform": st.lists(st.integers(), max_size=3) | JSON_VALUES,
        "layers_pattern": _PATTERNS | st.lists(_PATTERNS, max_size=3) | JSON_VALUES,
        "modules_to_save": JSON_VALUES,
        "init_lora_weights": st.text(max_size=8) | JSON_VALUES,
        "peft_type": JSON_VALUES,
        "bias": JSON_VALUES,
        "base_model_name_or_path": JSON_VALUES,
    },
)


@pytest.mark.parametrize("num_cases", NUM_CASES)
def test_any_values_are_a_configuration_or_refused(tmp_path: Path, num_cases: int) -> None:
    @few_and_many(num_cases)
    @given(fields=_FIELDS, others=st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=2))
    def check(fields: dict[str, Any], others: dict[str, Any]) -> None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(others | _MINIMAL | fields))
        try:
            spec = read_peft_config(tmp_path)
        except AdapterError as error:
            assert len(str(error)) < 2000 + len(str(tmp_path))
            return
        use(spec)

    check()


@pytest.mark.parametrize("name", ["bias", "rank_pattern", "target_modules", "unknown"])
@pytest.mark.parametrize("num_levels", [10, *range(900, 1000, 4), 10_000])
def test_values_of_many_levels_are_refused(tmp_path: Path, name: str, num_levels: int) -> None:
    value = "[" * num_levels + "]" * num_levels
    if name == "rank_pattern":
        value = f'{{"a": {value}}}'
    fields = json.dumps(_MINIMAL)[1:-1]
    (tmp_path / "adapter_config.json").write_text(f'{{{fields}, "{name}": {value}}}')
    with pytest.raises(AdapterError):
        read_peft_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {f"layers.{one}.x": 1 for one in range(5000)}},
        {"layers_pattern": [f"h{one}" for one in range(5000)], "layers_to_transform": [0]},
    ],
)
def test_very_many_patterns_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match="has 5000 patterns, at most 4096"):
        parse(**fields)


@pytest.mark.parametrize("rank", [2**31, 10**400])
def test_a_rank_that_no_adapter_has(rank: int) -> None:
    for fields in ({"r": rank}, {"rank_pattern": {"a": rank}}):
        with pytest.raises(AdapterError, match="a rank is an integer from 1"):
            parse(**fields)
