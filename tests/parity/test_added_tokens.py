"""Tokens beyond the base's vocabulary are their adapter's alone, from its tokenizer to answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.engine.assembly.adapter_check import run_check
from corun.runtime.errors import RequestError
from support.parity import VOCAB_SIZE, AdapterSpec, ParityCase
from tokenizers import AddedToken, Tokenizer

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_SIZE = VOCAB_SIZE + 4
_END = VOCAB_SIZE + 1  # ends the answers of the adapter
_SPECS = (
    AdapterSpec("more", {"r": 4, "trainable_token_indices": [_END, 5]}, _SIZE),
    AdapterSpec("same", {"r": 4}),
)
_PROMPT = [5, VOCAB_SIZE, 17, 40, _SIZE - 1, 33, 81]
_PLAIN_PROMPT = [5, 17, 40, 33, 81]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    case = ParityCase("llama3-rope", tmp_path_factory.mktemp("case"), specs=_SPECS)
    tokenizer = Tokenizer.from_file(str(case.directory / "tokenizer.json"))
    added = [AddedToken("<turn>"), AddedToken("<end>", special=True)]
    assert tokenizer.add_tokens(added) == 2 and tokenizer.token_to_id("<end>") == _END
    folder = case.adapters["more"]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {_END}}}')
    return case


@pytest.fixture(scope="module")
def engine(case: ParityCase) -> Iterator[Engine]:
    with Engine(model=str(case.directory), dtype="float32", device="cpu", max_model_len=64) as engine:
        yield engine


def lora(case: ParityCase, name: str) -> LoRARequest:
    return LoRARequest(name, 1, str(case.adapters[name]))


def only(*token_ids: int, **fields: object) -> SamplingParams:
    return SamplingParams(allowed_token_ids=token_ids, max_tokens=3, **fields)  # type: ignore[arg-type]


def test_texts_with_added_tokens(case: ParityCase, engine: Engine) -> None:
    params = only(VOCAB_SIZE)
    (output,) = engine.generate(["t5 <turn> t17"], [params], [lora(case, "more")])
    assert output.prompt_token_ids == [5, VOCAB_SIZE, 17]
    assert output.outputs[0].token_ids == [VOCAB_SIZE] * 3
    assert output.outputs[0].text == "<turn>" * 3


def test_an_added_token_ends_answers(case: ParityCase, engine: Engine) -> None:
    (output,) = engine.generate([_PROMPT], [only(_END)], [lora(case, "more")])
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([_END], "stop")


def test_prompts_are_scored_over_the_whole_vocabulary(case: ParityCase, engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    (output,) = engine.generate([_PROMPT], [params], [lora(case, "more")])
    truth = case.model("more", torch.float32)(torch.tensor([_PROMPT])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    scores = [found for found in output.prompt_logprobs if found is not None]
    for position, found in enumerate(scores):
        for token, one in found.items():
            assert abs(one.logprob - float(truth[position, token])) < 1e-4
    assert VOCAB_SIZE in scores[0] and len(scores) == len(_PROMPT) - 1


def test_no_neighbour_gets_an_added_token(case: ParityCase, engine: Engine) -> None:
    """Also where all tokens are nearly as likely."""
    wild = [
        SamplingParams(temperature=50.0, seed=seed, max_tokens=24, logprobs=20, ignore_eos=True)
        for seed in range(12)
    ]
    loras = [lora(case, "more") if i % 3 == 0 else None for i in range(12)]
    loras[1] = lora(case, "same")
    outputs = engine.generate([_PLAIN_PROMPT] * 12, wild, loras)
    drawn = {
        is_own: {
            token
            for output, asked in zip(outputs, loras, strict=True)
            if (asked is not None and asked.lora_name == "more") == is_own
            for token in (
                *output.outputs[0].token_ids,
                *(one for found in output.outputs[0].logprobs or () for one in found),
            )
        }
        for is_own in (True, False)
    }
    assert max(drawn[False]) < VOCAB_SIZE <= max(drawn[True]) < _SIZE


@pytest.mark.parametrize("name", [None, "same"])
def test_other_requests_cannot_name_an_added_token(
    name: str | None, case: ParityCase, engine: Engine
) -> None:
    one = None if name is None else lora(case, name)
    with pytest.raises(RequestError, match=f"has id {VOCAB_SIZE}, the model's ids are 0 to 95"):
        engine.generate([_PROMPT], [SamplingParams()], [one])
    for params in (only(VOCAB_SIZE), SamplingParams(logit_bias={VOCAB_SIZE: 1.0})):
        with pytest.raises(RequestError, match="the vocabulary has 96"):
            engine.generate([_PLAIN_PROMPT], [params], [one])
    with pytest.raises(RequestError, match=f"has id {_SIZE}, the model's ids are 0 to 99"):
        engine.generate([[_SIZE]], [SamplingParams()], [lora(case, "more")])


def test_the_report_says_what_is_stored(case: ParityCase) -> None:
    lines = run_check(case.adapters["more"], str(case.directory)).lines()
    assert "  rows      5 of model.embed_tokens; 100 tokens, the base 96" in lines
    assert "  rows      4 of lm_head; 100 tokens, the base 96" in lines


def test_a_tokenizer_with_more_tokens_than_the_weights(
    case: ParityCase, engine: Engine, tmp_path: Path
) -> None:
    """Prompts with such a token are refused, as over a base without an embedding for it."""
    folder = Path(shutil.copytree(case.adapters["more"], tmp_path / "larger"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<more {number}>" for number in range(3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    larger = LoRARequest("larger", 1, str(folder))
    with pytest.raises(RequestError, match=r"<more 2>.*only of ids 0 to 99"):
        engine.generate(["t5 <more 2>"], [SamplingParams()], [larger])
