"""Probes of a loaded model at start: its answers, its exact lengths, and its threads."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

from ...cpu_workers.affinity import limit_torch_threads
from ...runtime.config.engine import EngineConfig
from ...runtime.errors import ModelError
from ...runtime.kept_records import read_record, write_record
from ..forward.kernel_threads import num_kernel_threads, set_kernel_threads
from ..kept_choices import choice_path
from ..model.fingerprint import code_files, model_fingerprint
from ..model.load import quiet_library
from ..model.probe import MAX_PROBE_TOKENS, NUM_PROBE_SEQUENCES, PackedStep, check_parity
from ..model.source import ModelSource, describe
from ..model.weight_files import WeightFiles
from .adaptive_threads import AdaptiveThreads, ThreadChoice
from .assemble import LoadedModel, least, make_runner
from .threads import choose_threads, probe_tokens, set_threads
from .threshold_probe import judge_thresholds

_LOG = logging.getLogger(__name__)

# With these back ends, torch computes nothing large.
_ALL_OWN_KERNELS = {"linear": "numba", "attention": "numba", "LoRA": "numba", "fused kernels": "numba"}
_CORUN, _CODE = Path(__file__).parents[2], ("gpu", "cpu_workers")  # of forward passes
_ANY_LENGTH = 2**20  # for a model that does not state its context length


def probe(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    max_threads: int | None,
    owns_torch: bool = True,
    kept: Path | None = None,
) -> LoadedModel:
    """Compare packed rows with plain transformers, and choose the threads of the CPU device.

    Args:
        loaded: The model, before its pool is made.
        config: With ``skip_parity_probe`` a mismatch only logs a warning.
        max_threads: Limit of threads for this process; None = the current number.
        owns_torch: Whether the engine may set torch's number of threads in this process.
        kept: The folder with results of earlier starts; None = there is none.

    Returns:
        The model with its limits of tokens, and its threads.

    Raises:
        ModelError: Logits of packed rows differ from plain transformers.
    """
    num_columns = -(-max(MAX_PROBE_TOKENS, probe_tokens()) // loaded.layout.block_size)
    runner = make_runner(loaded, NUM_PROBE_SEQUENCES * num_columns)
    try:
        try:
            with quiet_library():  # it warns of configurations of omitted parts
                _compare(loaded, config, runner.probe_step, kept)
                loaded = _limited(loaded, config, kept)
        except ModelError as mismatch:
            if not config.skip_parity_probe:
                raise
            _LOG.warning("the parity probe failed and is ignored (--skip-parity-probe): %s", mismatch)
        if max_threads is not None and loaded.model.device.type == "cpu":
            shape = loaded.weights.num_bytes, loaded.layout, sorted(loaded.backend_names.items())
            path = choice_path(kept, "threads", max_threads, shape)
            choose_threads(runner, max_threads, loaded.weights.num_bytes, path)
    finally:
        runner.pool.close()
    if loaded.model.device.type != "cpu":
        return loaded
    threads = AdaptiveThreads(_limit_threads(loaded, config, owns_torch=owns_torch))
    return replace(loaded, threads=threads)


def _compare(loaded: LoadedModel, config: EngineConfig, step: PackedStep, kept: Path | None) -> None:
    """Compare logits, unless they agreed at an earlier start with all the same. ``ModelError``."""
    path = _verdict_path(loaded, config, kept)
    error = None if path is None else read_record(path, float)
    if error is not None:
        _LOG.info(
            "parity probe: not repeated, as it passed at an earlier start with the same weights, "
            "code and processor (largest relative difference of logits %.2g)",
            error,
        )
        return
    error = check_parity(loaded.model, loaded.hook, step)
    _LOG.info("parity probe passed: largest relative difference of logits %.2g", error)
    if path is not None:
        write_record(path, error, "the next start compares logits again")


def _verdict_path(loaded: LoadedModel, config: EngineConfig, kept: Path | None) -> Path | None:
    """The path for the result of a comparison on the CPU, named by all that it depends on."""
    if kept is None or loaded.model.device.type != "cpu":
        return None
    assert config.model is not None
    source = ModelSource(config.model, config.revision, config.trust_remote_code)
    weights = model_fingerprint(source, loaded.model.config, loaded.weights.label)
    stamps = WeightFiles(source).stamps()
    code = hashlib.sha256()
    own = (path for folder in _CODE for path in sorted((_CORUN / folder).rglob("*.py")))
    for path in (*own, *code_files(loaded.model)):
        code.update(path.read_bytes())
    backends = sorted(loaded.backend_names.items())
    return choice_path(kept, "parity", weights, stamps, loaded.layout, backends, code.hexdigest())


def _limit_threads(loaded: LoadedModel, config: EngineConfig, *, owns_torch: bool) -> ThreadChoice:
    """Limit torch's threads if possible, and return how the number of threads adapts."""
    is_all_own = _ALL_OWN_KERNELS.items() <= loaded.backend_names.items()
    if is_all_own:
        # A helper thread of torch would spin for milliseconds after each small sum, on the core
        # that the helper of corun's kernels needs.
        is_limited = limit_torch_threads()
        number = "1" if is_limited else "its default, because libgomp is not loaded"
        _LOG.info("threads of torch: %s", number)
    sets_torch = owns_torch and not is_all_own
    return ThreadChoice(
        num_kernel_threads(),
        set_threads if sets_torch else set_kernel_threads,
        is_fixed=config.fixed_cpu_threads,
        has_others=sets_torch,
    )


def _limited(loaded: LoadedModel, config: EngineConfig, kept: Path | None) -> LoadedModel:
    """``loaded`` with the limit that its thresholds set. Raises ``ModelError``."""
    made_for = getattr(loaded.config, "max_position_embeddings", None)
    longest = least(loaded.max_exact_len, made_for, config.max_model_len)
    max_tokens = max(longest or _ANY_LENGTH, loaded.max_step_tokens)
    verdict = judge_thresholds(loaded.model, max_tokens, None if kept is None else kept / "verdicts")
    name = describe(loaded.model.config)
    if verdict.outcome == "wrong":
        raise ModelError(
            f"logits of {name} from packed rows differ from plain transformers ({verdict.reason}), "
            "so corun would answer wrongly; --skip-parity-probe serves it anyway"
        )
    if verdict.outcome == "untried":
        _LOG.warning(
            "%s: contexts of more than %d tokens could not be compared with transformers, because "
            "no small copy of the model could be made (%s). Sliding windows and chunked attention "
            "are served; other behaviour that begins beyond this length is not detected",
            name,
            MAX_PROBE_TOKENS,
            verdict.reason,
        )
    if verdict.num_tokens is not None:
        _LOG.warning(
            "%s is exact up to %d tokens: at %s it begins to use the position of a token in its "
            "step instead of its position in the request. Requests and steps "
            "(--max-num-batched-tokens) are limited to this number of tokens",
            name,
            verdict.num_tokens,
            verdict.reason,
        )
        limit = least(loaded.max_exact_len, verdict.num_tokens)
        max_tokens = min(loaded.max_step_tokens, verdict.num_tokens)
        return replace(loaded, max_exact_len=limit, max_step_tokens=max_tokens)
    if longest != least(made_for, config.max_model_len):
        _LOG.warning(
            "%s: requests are limited to %s tokens, because corun does not support what begins "
            "there (chunked attention, or other rotary embeddings)",
            name,
            loaded.max_exact_len,
        )
    return loaded
