"""Reference results for the engine: plain transformers + PEFT."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from corun import Engine, LoRAMix, LoRARequest, SamplingParams
from corun.cpu_workers.kernels.simd.layout import GROUP_SIZE
from corun.gpu.linear.quantized import quantize
from corun.runtime.frontend.outputs import RequestOutput
from support.architectures import make_model, save_model
from support.bases import auto_class
from support.peft_adapters import edit_config, save_adapter
from support.tokenizers import save_word_tokenizer
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 96
MAX_LOGPROBS = 20
MAX_RELATIVE_ERROR = 1e-4  # of log-probabilities in float32
MAX_ERROR_RATIO = 1.5  # of PEFT's own error in 16 bits
_ROPES_BY_LENGTH = {"longrope", "dynamic"}


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter to make: PEFT's options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None  # of its vocabulary; None = as many as the base


ATTENTION_AND_MLP = """
    q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv_proj gate_up_proj query_key_value
    dense dense_h_to_4h dense_4h_to_h c_fc c_proj c_attn
""".split()
ADAPTER_SPECS = (
    AdapterSpec("plain", {"r": 4, "lora_alpha": 6}),
    AdapterSpec("rs", {"r": 9, "lora_alpha": 4, "use_rslora": True}),
    AdapterSpec("one", {"r": 1, "lora_alpha": 1, "layers_to_transform": [1]}),
    AdapterSpec(
        "patterns",
        {
            "r": 8,
            "lora_alpha": 8,
            "rank_pattern": {"o_proj": 3, "dense": 3, "^.*layers.0.*down_proj": 17, "c_proj": 17},
            "alpha_pattern": {"o_proj": 5, "layers.1.*v_proj": 2},
        },
    ),
)


def linear_names(model: PreTrainedModel) -> list[str]:
    """Names of the linears that adapters of this model may have, without expert routers."""
    names = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    }
    return sorted(names & set(ATTENTION_AND_MLP))


Answers = list[tuple[str | None, RequestOutput]]  # with the adapter's name; None = the base


class ParityCase:
    """A model directory and its adapters, with their truth in any dtype."""

    def __init__(
        self,
        architecture: str,
        directory: Path,
        *,
        seed: int = 0,
        specs: Sequence[AdapterSpec] = ADAPTER_SPECS,
        quantization: str | None = None,
    ) -> None:
        """``quantization``: what base weights are that, and those of the head, before they are
        dequantised again.
        """
        self._bits = {None: None, "int8": 8, "int4": 4, "w8a8": 8}[quantization]
        self.directory = save_model(architecture, directory / "model", seed=seed)
        save_word_tokenizer(self.directory, VOCAB_SIZE)
        self.adapters: dict[str, Path] = {}
        # By adapter; None = the base.
        self.num_tokens: dict[str | None, int] = {None: VOCAB_SIZE}
        rope = getattr(AutoConfig.from_pretrained(self.directory), "rope_parameters", None) or {}
        self._depends_on_length = rope.get("rope_type") in _ROPES_BY_LENGTH
        self._adapter_bytes: dict[torch.dtype, int] = {}
        self._models: dict[tuple[str | None, torch.dtype], Any] = {}
        self._rows: dict[tuple[str | None, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        targets = linear_names(make_model(architecture))
        for number, spec in enumerate(specs):
            path = directory / "adapters" / spec.name
            options = {"target_modules": targets, **spec.options}
            save_adapter(path, architecture, seed=seed + number, num_tokens=spec.num_tokens, **options)
            edit_config(path, base_model_name_or_path=None)
            self.adapters[spec.name] = path
            self.num_tokens[spec.name] = spec.num_tokens or VOCAB_SIZE

    def loras(self, names: Sequence[str | None]) -> list[LoRARequest | None]:
        """What requests for these adapters name; None = the base."""
        return [name and LoRARequest(name, 1, str(self.adapters[name])) for name in names]  # type: ignore[misc]

    def add_mix(self, parts: Sequence[tuple[str, float]], truth: str | None = None) -> LoRAMix:
        """Let PEFT save the ``cat`` of adapters as another one, by default named as the mix."""
        mix, names = LoRAMix(parts), [name for name, _ in parts]
        path = self.directory.parent / "mixes" / str(len(self.adapters))
        model: Any = copy.deepcopy(self.model(None, torch.float32))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT about itself
            model = peft.PeftModel.from_pretrained(model, self.adapters[names[0]], names[0])
            for name in names[1:]:
                model.load_adapter(self.adapters[name], name)
            scales = [scale for _, scale in parts]
            model.add_weighted_adapter(names, scales, "mix", combination_type="cat")
            model.save_pretrained(str(path), selected_adapters=["mix"])
        self.adapters[truth or mix.lora_name] = path / "mix"
        return mix

    def truth(
        self, adapter: str | None, token_ids: list[int], first: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Log-probabilities of the tokens from index ``first`` on: [tokens - first, vocabulary].

        A model with rotary factors that depend on the length runs at the lengths of a server: each
        row is computed from its own prefix alone.
        """
        if not self._depends_on_length:
            return self._rows_after(adapter, dtype, token_ids[:-1], len(token_ids) - first)
        ends = range(first, len(token_ids))
        return torch.cat([self._rows_after(adapter, dtype, token_ids[:end], 1) for end in ends])

    def model(self, adapter: str | None, dtype: torch.dtype) -> Any:
        """Plain transformers + PEFT with eager attention; loaded once."""
        key = (adapter, dtype)
        if key not in self._models:
            if key == (None, torch.float32):
                model = self._read_base()
            else:
                model = copy.deepcopy(self.model(None, torch.float32)).to(dtype)
            if adapter is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of PEFT about itself
                    num_tokens = self.num_tokens.get(adapter, VOCAB_SIZE)  # a mix has the base's
                    if num_tokens != VOCAB_SIZE:
                        model.resize_token_embeddings(num_tokens)
                    model = peft.PeftModel.from_pretrained(model, self.adapters[adapter])
            self._models[key] = model.eval()
        return self._models[key]

    def adapter_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all adapters on the device."""
        if dtype not in self._adapter_bytes:
            name = str(dtype).removeprefix("torch.")
            with Engine(model=str(self.directory), device="cpu", dtype=name) as engine:
                for adapter, path in self.adapters.items():
                    engine.add_lora(LoRARequest(adapter, 1, str(path)))
                self._adapter_bytes[dtype] = sum(one.num_bytes for one in engine.list_loras())
        return self._adapter_bytes[dtype]

    def kv_block_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of a block of so many tokens."""
        config = AutoConfig.from_pretrained(self.directory)
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        num_layers, keys_and_values, dim = 2, 2, 16
        return int(num_layers * keys_and_values * num_tokens * num_kv_heads * dim * dtype.itemsize)

    def _read_base(self) -> Any:
        config = AutoConfig.from_pretrained(self.directory)
        model = auto_class(config).from_pretrained(
            self.directory, dtype=torch.float32, attn_implementation="eager"
        )
        if self._bits is not None:
            dequantize_linears(model, self._bits)
        return model

    def _rows_after(
        self, adapter: str | None, dtype: torch.dtype, tokens: list[int], count: int
    ) -> torch.Tensor:
        """Log-probabilities of what follows each of the last ``count`` tokens; computed once."""
        key = (adapter, dtype, (*tokens, count))
        if key not in self._rows:
            model = self.model(adapter, dtype)
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([tokens])).logits[0, -count:]
            self._rows[key] = torch.log_softmax(logits.float(), dim=-1)
        return self._rows[key]


def dequantize_linears(model: PreTrainedModel, bits: int) -> None:
    """Quantise and dequantise the weights of all linears with inputs of whole groups."""
    for module in model.modules():
        if type(module) in (torch.nn.Linear, Conv1D):
            is_transposed = type(module) is Conv1D
            matrix = module.weight.T if is_transposed else module.weight
            if matrix.shape[1] % GROUP_SIZE == 0:
                left = torch.from_numpy(quantize(matrix, bits).dequantized())
                left = left.T.contiguous() if is_transposed else left
                module.weight = torch.nn.Parameter(left, requires_grad=False)


class HalfErrors:
    """Errors against float32 truth, beside those of PEFT in ``dtype`` at the same places.

    ``control``: the case of PEFT, if it has other weights than that of the truth.
    """

    def __init__(
        self, case: ParityCase, dtype: torch.dtype = torch.bfloat16, control: ParityCase | None = None
    ) -> None:
        self._case = case
        self._dtype = dtype
        self._control = control or case
        self._ours: list[torch.Tensor] = []
        self._theirs: list[torch.Tensor] = []

    def add(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        candidates: Sequence[dict[int, float]],
    ) -> None:
        """``candidates``: by output token, log-probabilities by token id."""
        assert len(candidates) == len(token_ids) > 0
        tokens, first = [*prompt, *token_ids], len(prompt)
        truth = self._case.truth(adapter, tokens, first, torch.float32)
        half = self._control.truth(adapter, tokens, first, self._dtype)
        for position, found in enumerate(candidates):
            ids = list(found)
            logprobs = torch.tensor([found[i] for i in ids])
            self._ours.append((logprobs - truth[position, ids]).abs())
            self._theirs.append((half[position, ids] - truth[position, ids]).abs())

    def add_output(self, adapter: str | None, output: RequestOutput) -> None:
        """All choices of one prompt."""
        for choice in output.outputs:
            assert choice.logprobs is not None
            candidates = [{token: found.logprob for token, found in one.items()} for one in choice.logprobs]
            self.add(adapter, output.prompt_token_ids, choice.token_ids, candidates)

    @property
    def means(self) -> tuple[float, float]:
        return float(torch.cat(self._ours).mean()), float(torch.cat(self._theirs).mean())

    def check(self, max_ratio: float = MAX_ERROR_RATIO) -> None:
        """We are about as near to the truth as PEFT, or nearer."""
        error, peft_error = self.means
        assert 0 < error <= max_ratio * peft_error, (error, peft_error)


def ask_turns(
    engine: Engine,
    case: ParityCase,
    names: Sequence[str | None],
    asked: Sequence[list[int]],
    params: SamplingParams,
    num_turns: int = 2,
) -> Answers:
    """All together, ``num_turns`` times, in blocks of 4 tokens.

    Each turn but the first finds what the one before it has left.
    """
    answers: Answers = []
    for turn in range(num_turns):
        outputs = engine.generate(list(asked), params, case.loras(names), predicted_output_tokens=1)
        found = [output.outputs[0].num_cached_tokens for output in outputs]
        # The last token of an answer has no KV: nothing was computed after it.
        assert found == [(len(one) - 2) // 4 * 4 if turn else 0 for one in asked]
        answers += zip(names, outputs, strict=True)
        asked = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 5] for out in outputs]
    return answers


def check_exact(case: ParityCase, answers: Answers) -> None:
    """Greedy answers in float32 are those of PEFT."""
    errors = [(largest_error(case, output, name), name) for name, output in answers]
    assert all(error < MAX_RELATIVE_ERROR for error, _ in errors), errors


def check_half(case: ParityCase, answers: Answers, dtype: torch.dtype = torch.bfloat16) -> None:
    """Answers in ``dtype`` are about as near to float32 truth as those of PEFT in that type."""
    errors = HalfErrors(case, dtype)
    for name, output in answers:
        errors.add_output(name, output)
    errors.check()


def largest_error(case: ParityCase, output: Any, adapter: str | None, *, is_greedy: bool = True) -> float:
    """Largest error of the log-probabilities of all choices against float32 truth, as a share.

    Also asserts that every greedy token is a maximum of the truth, up to a near-tie.
    """
    worst = 0.0
    for choice in output.outputs:
        tokens = [*output.prompt_token_ids, *choice.token_ids]
        truth = case.truth(adapter, tokens, len(output.prompt_token_ids), torch.float32)
        scale = float(truth.abs().max())
        for position, (token, candidates) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            row = truth[position]
            for candidate, logprob in candidates.items():
                worst = max(worst, abs(logprob.logprob - float(row[candidate])) / scale)
            if is_greedy:
                assert float(row.max() - row[token]) <= 1e-4 * scale, (position, token)
    return worst
