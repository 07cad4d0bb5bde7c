"""Tries one class of transformers: answers of the engine against plain transformers and PEFT."""

import copy
import logging
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ...gpu.model.probe import MAX_PROBE_TOKENS
from ...gpu.model.skeleton import target_map_of
from ...gpu.model.small_copy import build_random, shrink_thresholds
from ...gpu.model.source import ModelSource
from ..errors import CorunError
from ..frontend.engine import Engine
from ..frontend.outputs import LoRARequest, RequestOutput
from ..sampling import SamplingParams
from .outcome import ADAPTER_KINDS, Parity, Trial
from .tiny_config import VOCAB_SIZE, ModelClass, model_classes, tiny_config

_MAX_ERROR = 1e-4  # of log-probabilities, as a share of the largest one
_MAX_PARAMETERS = 400_000_000
_MAX_THRESHOLD = 2**24
_PROMPT_TOKENS = (101, 61, 38, 5)
_STEP_TOKENS = 23
_BLOCK_TOKENS = 4
_ANSWER_TOKENS = 6
_ANSWER = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, logprobs=8, ignore_eos=True)
_RANKS = {"attention": 4, "feed-forward": 6, "all-linear": 3}


def try_model(model_type: str, directory: Path) -> Trial:
    """Make a tiny random model of the type and its adapters in ``directory``, serve and compare."""
    model_class = model_classes()[model_type]
    trial = Trial(model_type, model_class.model.__name__)
    with _quiet():
        try:
            model = _make_model(model_class, directory)
        except Exception as error:  # any error of the class
            return trial.ended(Parity.NOT_BUILT, _reason(error, directory))
        try:
            return _Comparison(model, directory).run(trial)
        except CorunError as error:
            return trial.ended(Parity.REFUSED, _reason(error, directory))


def _make_model(model_class: ModelClass, directory: Path) -> PreTrainedModel:
    """Save a random model, with thresholds between the probe's prompts and those below."""
    config: Any = tiny_config(model_class.config)
    if model_class.model.config_class is type(config.get_text_config()):
        config = config.get_text_config()
    shrink_thresholds(model_class.model, config, MAX_PROBE_TOKENS + 1, _MAX_THRESHOLD)
    with torch.device("meta"):
        shapes = model_class.model(copy.deepcopy(config)).parameters()
    num_parameters = sum(one.numel() for one in shapes)
    if num_parameters > _MAX_PARAMETERS:
        raise ValueError(f"it has {num_parameters // 10**6} million parameters")
    build_random(model_class.model, config).save_pretrained(directory)
    vocab = {f"t{i}": i for i in range(VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2").save_pretrained(  # noqa: S106
        directory
    )
    # Some classes tie weights when they are read, but not when they are made.
    return model_class.model.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


class _Comparison:
    """A model in a directory, served with its adapters, and their truth."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._adapted: dict[str | None, Any] = {None: model}
        self._outcomes: dict[str, Parity] = {}
        self._reasons: dict[str, str] = {}

    def run(self, trial: Trial) -> Trial:
        """Return the result. Raises ``CorunError`` if the model is refused."""
        with Engine(
            model=str(self._directory),
            device="cpu",
            dtype="float32",
            block_size=_BLOCK_TOKENS,
            memory_gib=0.25,
            max_num_batched_tokens=_STEP_TOKENS,
        ) as engine:
            adapters = self._add_adapters(engine)
            rounds = [self._ask(engine, adapters, is_known) for is_known in (False, True)]
            limit = engine.get_model_info().max_model_len
        for name in (None, *adapters):
            outputs = [output for one in rounds for output in one[name]]
            error = self._largest_error(name, outputs)
            self._outcomes[name or "base"] = Parity.EXACT if error < _MAX_ERROR else Parity.WRONG
        if limit < _PROMPT_TOKENS[0]:
            self._reasons["base"] = "exact up to its first threshold, where requests end"
        outcomes = [self._outcomes.get(kind, Parity.NONE) for kind in ("base", *ADAPTER_KINDS)]
        return trial.with_results(outcomes, self._reasons)

    def _add_adapters(self, engine: Engine) -> Sequence[str]:
        added = []
        for kind, targets in self._targets().items():
            path = self._directory / kind
            try:
                self._save_adapter(path, kind, targets)
            except Exception as error:  # any error of PEFT about the class
                self._refuse(kind, Parity.NOT_BUILT, error)
                continue
            try:
                engine.add_lora(LoRARequest(kind, 1, str(path)))
            except CorunError as error:
                self._refuse(kind, Parity.REFUSED, error)
            else:
                added.append(kind)
        return added

    def _refuse(self, kind: str, outcome: Parity, error: Exception) -> None:
        self._outcomes[kind] = outcome
        self._reasons[kind] = _reason(error, self._directory)

    def _targets(self) -> Mapping[str, Sequence[str] | str]:
        """Names of linears, as users list them, by the kind of adapter."""
        names: dict[str, set[str]] = {"attention": set(), "feed-forward": set()}
        for target in target_map_of(ModelSource(str(self._directory))).targets:
            *parents, name = target.path.split(".")
            is_attention = any("attn" in one or "attention" in one for one in parents)
            if target.is_inside and not name.isdigit():  # which is a place in a list
                names["attention" if is_attention else "feed-forward"].add(name)
        names["attention"] -= names["feed-forward"]  # an adapter takes all modules of a name
        found = {kind: sorted(found) for kind, found in names.items() if found}
        return {**found, "all-linear": "all-linear"}

    def _save_adapter(self, path: Path, kind: str, targets: Sequence[str] | str) -> None:
        rank = _RANKS[kind]
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=targets, use_rslora=kind == "feed-forward"
        )
        adapted = get_peft_model(copy.deepcopy(self._model), config)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(0.0, 0.1, generator=generator)
        adapted.save_pretrained(str(path))
        read = PeftModel.from_pretrained(copy.deepcopy(self._model), str(path)).eval()
        values = dict(adapted.named_parameters())
        for name, parameter in read.named_parameters():
            if ".lora_" in name and not torch.equal(parameter, values[name]):
                raise ValueError(f"PEFT reads other values of {name} than it has written")
        self._adapted[kind] = read

    def _ask(
        self, engine: Engine, adapters: Sequence[str], is_known: bool
    ) -> Mapping[str | None, Sequence[RequestOutput]]:
        """Ask for all at once; return outputs by adapter. ``is_known``: asked before.

        Raises ``RuntimeError`` if requests fail or the prefix cache has no or too many hits.
        """
        rng = random.Random(7)  # noqa: S311 - test data
        longest = engine.get_model_info().max_model_len - _ANSWER_TOKENS
        names = [name for _ in _PROMPT_TOKENS for name in (None, *adapters)]
        lengths = [
            min(num, longest - i % 3) for i, num in enumerate(_PROMPT_TOKENS) for _ in (None, *adapters)
        ]
        prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in lengths]
        loras = [name and LoRARequest(name, 1, str(self._directory / name)) for name in names]
        try:
            outputs = engine.generate(prompts, _ANSWER, loras)
        except CorunError as error:  # no refusal: the model and its adapters were accepted
            raise RuntimeError(f"requests fail: {error}") from error
        found = max(output.outputs[0].num_cached_tokens for output in outputs)
        if (found >= max(lengths) // 2) != is_known:
            raise RuntimeError(f"{found} tokens come from the prefix cache")
        grouped: dict[str | None, list[RequestOutput]] = {name: [] for name in names}
        for name, output in zip(names, outputs, strict=True):
            grouped[name].append(output)
        return grouped

    def _largest_error(self, adapter: str | None, outputs: Sequence[RequestOutput]) -> float:
        model = self._adapted[adapter]
        return max(_error(model, output, self._depends_on_length()) for output in outputs)

    def _depends_on_length(self) -> bool:
        rope = getattr(self._model.config.get_text_config(), "rope_parameters", None) or {}
        return bool({"longrope", "dynamic"} & set(re.findall(r"\w+", repr(rope))))


def _error(model: Any, output: RequestOutput, depends_on_length: bool) -> float:
    """Largest error of the log-probabilities of an answer, as a share of the largest one."""
    (choice,) = output.outputs
    prompt = list(output.prompt_token_ids)
    num = len(choice.token_ids)
    tokens = torch.tensor([[*prompt, *choice.token_ids]])[:, :-1]
    ends = range(len(prompt), len(prompt) + num) if depends_on_length else [tokens.shape[1]]
    with torch.inference_mode():
        logits = [model(input_ids=tokens[:, :end], use_cache=False).logits[0] for end in ends]
    rows = torch.cat([one[-1:] for one in logits]) if depends_on_length else logits[0][-num:]
    truth = torch.log_softmax(rows.float(), dim=-1)
    assert choice.logprobs is not None
    errors = [
        abs(found.logprob - float(truth[position, token]))
        for position, candidates in enumerate(choice.logprobs)
        for token, found in candidates.items()
    ]
    return max(errors) / float(truth.abs().max())


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no warnings of libraries about tiny models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


_MAX_REASON_CHARS = 240
# What differs from run to run or from machine to machine, and what the row or all reasons have.
_LEFT_OUT = re.compile(
    r" ?\(relative error [^)]*\)|(?<=target_parameters)=\[[^\]]*\]"
    r"|^MODEL/[\w/-]+(\.json)?: |the adapter does not fit the model:"
    r"|^cannot build 'MODEL' \([^)]*\): |^[\w.-]+, \w+ (cannot be served: )?(?=\w)"
)


def _reason(error: Exception, directory: Path) -> str:
    """The reason on one line: of corun's errors the first line, of others the beginning."""
    text = str(error).strip().replace(str(directory), "MODEL")
    if not isinstance(error, CorunError):
        return f"{type(error).__name__}: {' '.join(text.split())}"[:_MAX_REASON_CHARS]
    first, *others = _LEFT_OUT.sub("", text).strip().splitlines()
    more = f" (and {len(others)} more)" if others else ""
    return f"{first[:_MAX_REASON_CHARS]}{more}"
