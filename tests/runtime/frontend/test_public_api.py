"""``import corun``: cheap, lazy, complete, and with all features of HTTP by the same names."""

import inspect
import subprocess
import sys
from dataclasses import fields

import corun
import pytest
from corun.runtime import errors
from corun.runtime.adapters.resolve import ResolveError
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.frontend.engine import Engine
from corun.runtime.frontend.outputs import CompletionOutput, RequestOutput
from corun.runtime.sampling import SamplingParams
from corun.runtime.server.chat import ChatRequest
from corun.runtime.server.chat_messages import ConversationFields, ToolFields
from corun.runtime.server.completions import CompletionRequest
from corun.runtime.server.generation_request import StructureFields
from corun.runtime.server.lora_routes import LoadRequest, UnloadRequest
from corun.runtime.server.route_docs import ROUTE_DOCS

HEAVY = {"torch", "transformers", "numpy", "msgspec", "asyncio", "tokenizers", "numba"}


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    loaded = run_python("import corun, sys; print(*sys.modules)").split()
    assert HEAVY.isdisjoint(loaded)
    assert [name for name in loaded if name.startswith("corun")] == ["corun"]


def test_public_classes_come_without_torch() -> None:
    code = "import sys\nfrom corun import *\nprint(Engine.__name__, 'torch' in sys.modules)"
    assert run_python(code) == "Engine False"


def test_all_names_are_there() -> None:
    for name in corun.__all__:
        assert getattr(corun, name) is not None
    assert set(corun.__all__) <= set(dir(corun))


def test_every_error_is_public() -> None:
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.CorunError)
    }
    assert names <= set(corun.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        corun.Enigne  # noqa: B018


def test_errors_travel_between_processes_by_name() -> None:
    for kind, expected in (("AdapterError", errors.AdapterError), ("OSError", errors.ModelError)):
        error = errors.rebuild_error(kind, "text", default=errors.ModelError)
        assert type(error) is expected
        assert "text" in str(error)
    refused = ResolveError(["bad name"])
    error = errors.rebuild_error(refused.kind, str(refused), default=errors.StepFailedError)
    assert type(error) is errors.AdapterError
    assert str(error) == str(refused)


SAMPLING = {field.name for field in fields(SamplingParams)}
# Fields that only the form of HTTP needs, and their counterparts in Python.
OF_HTTP = {
    **dict.fromkeys(("model", "lora"), "lora_request"),
    **dict.fromkeys(("messages", *ConversationFields.model_fields), "Engine.apply_chat_template"),
    **dict.fromkeys(ToolFields.model_fields, "Engine.apply_chat_template"),
    **dict.fromkeys(StructureFields.model_fields, "structured_output"),
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "stream": "AsyncEngine.generate",
    "stream_options": "AsyncEngine.generate",
    "echo": "RequestOutput.prompt",
    "return_timing": "CompletionOutput.timing",
    "return_token_ids": "CompletionOutput.token_ids",
}
OF_PYTHON = {
    "bad_words_ids",  # tokens, which HTTP gives as texts
    "structured_output",  # one value, for which HTTP has many names
}
METHODS = {
    "/v1/completions": "generate",
    "/v1/chat/completions": "generate",
    "/v1/responses": "generate",
    "/v1/messages": "generate",
    "/v1/models": "get_model_info",
    "/v1/models/{model}": "get_model_info",
    "/v1/lora_adapters": "list_loras",
    "/v1/lora_adapters/{name}": "list_loras",
    "/v1/load_lora_adapter": "add_lora",
    "/load_lora_adapter": "add_lora",
    "/v1/unload_lora_adapter": "remove_lora",
    "/unload_lora_adapter": "remove_lora",
    "/tokenize": "get_tokenizer",
    "/detokenize": "get_tokenizer",
    "/metrics": "get_stats",
    # Of the server itself.
    "/v1/engine_state": None,
    "/v1/profile": None,
    "/health": None,
    "/ready": None,
    "/version": None,
    "/openapi.json": None,
}
CLASSES = {kind.__name__: kind for kind in (AsyncEngine, CompletionOutput, Engine, RequestOutput)}


def parameters_of(engine: type, method: str) -> set[str]:
    return set(inspect.signature(getattr(engine, method)).parameters)


@pytest.mark.parametrize("request_class", [CompletionRequest, ChatRequest])
def test_every_field_is_a_parameter(request_class: type[CompletionRequest | ChatRequest]) -> None:
    wanted = set(request_class.model_fields) - SAMPLING - OF_HTTP.keys() - {"prompt"}
    for engine in (Engine, AsyncEngine):
        assert wanted - {"request_id"} <= parameters_of(engine, "generate"), engine


def test_what_stands_for_a_field_is_there() -> None:
    for field, stand_in in OF_HTTP.items():
        owner, _, attribute = stand_in.rpartition(".")
        if owner:
            assert attribute in {*dir(CLASSES[owner]), *inspect.get_annotations(CLASSES[owner])}
        else:
            assert stand_in in SAMPLING | parameters_of(Engine, "generate"), field


def test_conversations_are_written_by_the_same_names() -> None:
    wanted = {"messages", "lora_request", *ConversationFields.model_fields}
    for engine in (Engine, AsyncEngine):
        assert parameters_of(engine, "apply_chat_template") - {"self"} == wanted


def test_how_old_statistics_are_is_told() -> None:
    for engine in (Engine, AsyncEngine):
        assert isinstance(inspect.getattr_static(engine, "stats_age_s"), property)


def test_every_parameter_of_sampling_is_a_field() -> None:
    served = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert SAMPLING - served == OF_PYTHON


def test_both_engines_generate_by_the_same_names() -> None:
    only_one_at_a_time = {"prompt", "request_id", "watch"}
    of_async = parameters_of(AsyncEngine, "generate") - only_one_at_a_time
    assert parameters_of(Engine, "generate") - {"prompts"} == of_async


def test_every_route_has_its_method() -> None:
    assert {path for _, path in ROUTE_DOCS} == METHODS.keys()
    for method in filter(None, METHODS.values()):
        assert hasattr(Engine, method) and hasattr(AsyncEngine, method), method


def test_adapters_are_loaded_by_the_same_names() -> None:
    renamed = {"lora_name": "lora_request", "lora_path": "lora_request", "load_inplace": "replace"}
    wanted = {renamed.get(name, name) for name in LoadRequest.model_fields}
    for engine in (Engine, AsyncEngine):
        assert wanted <= parameters_of(engine, "add_lora")
        unloading = set(UnloadRequest.model_fields) - {"lora_int_id"}
        assert unloading <= parameters_of(engine, "remove_lora")
