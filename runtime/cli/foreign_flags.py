"""Flags of vLLM, SGLang and llama.cpp: what ``corun serve`` has instead, in one sentence each."""

from collections.abc import Mapping, Sequence

from ..errors import ConfigError

_MODEL = "is not needed: the model is the first argument, a directory or a hub id, no GGUF file"
_ADAPTERS = "is called --lora-modules NAME=PATH or --lora-dir DIR here, and takes PEFT directories"
_NO_LIMIT = "is not needed: as many adapters are served together as fit into --memory-gib"
_FRACTION = "is called --memory-fraction here: a share of the memory that is free after the model"
_LENGTH = "is called --max-model-len here"
_REQUESTS = "is called --max-num-seqs here"
_ONE_DEVICE = "is not there: an engine has one device, and corun cluster --engines N has several"
_LAYERS = "is not there: all layers of the base model are on one device (--device)"

FOREIGN_FLAGS: Mapping[str, str] = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "-m": _MODEL,
    "-hf": _MODEL,
    "--enable-lora": "is not needed: adapters are always served (--lora-dir, --lora-modules)",
    "--lora-paths": _ADAPTERS,
    "--lora": _ADAPTERS,
    "--max-loras": _NO_LIMIT,
    "--max-loras-per-batch": _NO_LIMIT,
    "--max-cpu-loras": "is called --host-adapter-bytes here, and is a size such as 4GiB",
    "--gpu-memory-utilization": _FRACTION,
    "--mem-fraction-static": _FRACTION,
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "--max-running-requests": _REQUESTS,
    "--parallel": _REQUESTS,
    "--chunked-prefill-size": "is called --max-num-batched-tokens here",
    "--enable-chunked-prefill": "is not needed: long prompts are always computed in chunks",
    "--enable-prefix-caching": "is not needed: --prefix-cache is on by default",
    "--disable-radix-cache": "is called --prefix-cache off here",
    "--swap-space": "is called --host-kv-bytes here, and is a size such as 16GiB",
    "--kv-cache-dtype": "is not there: the KV cache has the type of the model (--dtype)",
    "--enforce-eager": "is called --decode-graphs off here",
    "--tensor-parallel-size": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--n-gpu-layers": _LAYERS,
    "-ngl": _LAYERS,
    "--threads": "is called --cpu-threads here",
    "--tool-call-parser": "is not needed: the form of calls follows from the tokenizer's response "
    "template or from the chat template (else give --response-template FILE)",
}


def check_foreign_flags(argv: Sequence[str], own: Sequence[str]) -> None:
    """Raise ``ConfigError`` for the first flag that another server has and this command has not."""
    for word in argv:
        flag = word.split("=", 1)[0]
        if flag in FOREIGN_FLAGS and flag not in own:
            raise ConfigError(f"{flag} {FOREIGN_FLAGS[flag]}")
