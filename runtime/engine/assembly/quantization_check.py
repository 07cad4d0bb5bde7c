"""``corun check --quantization``: measures what a model loses in fewer bits.

Of a checkpoint that is quantised on disk, the full weights are its dequantised ones. With ``off``
they are compared with the form in which the checkpoint is served otherwise.

corun guarantees no quality; this shows the figures before a model is served.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...config.engine import OFF, EngineConfig
from ...errors import ConfigError
from ...machine.facts import read_machine_facts
from ..tokenizer import load_tokenizer
from .placement import kept_directory, place_engine

if TYPE_CHECKING:
    import torch

    from ....gpu.execution.assemble import LoadedModel

_MIB = 2**20
_WINDOW_TOKENS = 256  # of one window of attention
_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class _Figures:
    kind: str
    num_bytes: int
    num_in_full: int  # see ``Weights``
    perplexity: float
    next_tokens: tuple[int, ...]  # the most likely one after each token


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """Compares full weights with weights in fewer bits, over the same text."""

    model: str
    full: _Figures
    quantized: _Figures

    @property
    def agreement(self) -> float:
        """Share of tokens after which both have the same most likely token."""
        pairs = list(zip(self.full.next_tokens, self.quantized.next_tokens, strict=True))
        return sum(a == b for a, b in pairs) / len(pairs)

    def lines(self) -> tuple[str, ...]:
        full, quantized = self.full, self.quantized
        share = quantized.num_bytes / full.num_bytes
        change = quantized.perplexity / full.perplexity - 1
        lines = (
            f"{self.model} in {quantized.kind}, against {full.kind}, over {len(full.next_tokens)} tokens",
            f"  weights     {quantized.num_bytes / _MIB:.1f} MiB, {full.num_bytes / _MIB:.1f} MiB "
            f"before ({share:.0%})",
            f"  perplexity  {quantized.perplexity:.4g}, {full.perplexity:.4g} before ({change:+.2%})",
            f"  next token  the same after {self.agreement:.1%} of all tokens",
        )
        if not quantized.num_in_full:
            return lines
        count = f"{quantized.num_in_full} matrices that the files have in fewer bits"
        return (*lines, f"  in full     {count}")


def compare_quantized(config: EngineConfig, text: str) -> QuantizationReport:
    """Load the model on the CPU, first quantised as in ``config``, then in full, and compare.

    Raises ``ConfigError`` if the text is too short, or both are the same; ``ModelError`` if the
    model cannot be loaded.
    """
    assert config.model is not None and config.quantization is not None
    from ....gpu.execution.threads import set_threads
    from ....gpu.model.source import ModelSource, check_directory

    model = config.model
    config = replace(config, device="cpu")
    check_directory(ModelSource(model, config.revision, config.trust_remote_code))
    tokenizer = load_tokenizer(model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    tokens = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[:_MAX_TOKENS]
    if len(tokens) < 2:
        raise ConfigError(f"--text has {len(tokens)} tokens, too few to predict any")
    placement = place_engine(config, read_machine_facts())
    set_threads(placement.machine.num_threads)
    full_config = replace(config, quantization=OFF, lm_head_quantization="auto")
    if config.quantization == OFF:
        config = replace(config, quantization=None)
    quantized, full = (_figures(one, tokens) for one in (config, full_config))
    return QuantizationReport(model, full, quantized)


def _figures(config: EngineConfig, tokens: list[int]) -> _Figures:
    from ....gpu.execution import assemble
    from ....gpu.model.source import ModelSource

    assert config.model is not None
    source = ModelSource(config.model, config.revision, config.trust_remote_code)
    loaded = assemble.load(source, config, lambda _: None, kept=kept_directory())
    try:
        if config.quantization != OFF and not loaded.weights.quantized_bytes:
            raise ConfigError(
                f"{config.model} is served in full; give --quantization int8 or int4, to compare with it"
            )
        kind = loaded.weights.kind or str(loaded.dtype).removeprefix("torch.")
        loss, next_tokens = 0.0, []
        for window, logprobs in _logprobs(loaded, tokens):
            followers = window[1:]
            loss -= float(logprobs[range(len(followers)), followers].sum())
            next_tokens += logprobs.argmax(dim=-1).tolist()
        perplexity = math.exp(loss / len(next_tokens))
        weights = loaded.weights
        if weights.late is not None:
            weights.late.write()
        return _Figures(kind, weights.num_bytes, weights.num_in_full, perplexity, tuple(next_tokens))
    finally:
        loaded.close()


def _logprobs(loaded: "LoadedModel", tokens: list[int]) -> Iterator[tuple[list[int], "torch.Tensor"]]:
    """Yield windows of the text with the log-probabilities after all tokens but the last."""
    import torch

    loaded.model.set_attn_implementation("eager")
    for start in range(0, len(tokens) - 1, _WINDOW_TOKENS):
        window = tokens[start : start + _WINDOW_TOKENS + 1]
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([window[:-1]]), use_cache=False).logits[0]
        yield window, torch.log_softmax(logits.float(), dim=-1)
