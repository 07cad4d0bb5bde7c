"""First on the path, this hides from a process and its children what a bare machine lacks.

Such a machine has torch, triton, numpy and cuda-bindings, and what these bring.
"""

import sys
from importlib.machinery import ModuleSpec

_MISSING = """
    fastapi httptools huggingface_hub llvmlite matplotlib msgspec numba peft posix_ipc
    prometheus_client psutil pydantic pytest safetensors starlette tokenizers transformers uvicorn
    uvloop yaml
""".split()


class _Missing:
    """A finder of modules that finds these nowhere."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in _MISSING:
            raise ModuleNotFoundError(f"No module named {name!r} on a bare machine", name=name)
        return None


sys.meta_path.insert(0, _Missing)
