"""All that is left out, for processes that are corun's own. Before torch and transformers."""

from .availability import leave_out_distributed
from .compiler import defer_compiler
from .model_index import keep_model_index


def lean_imports() -> None:
    """Let this process import of torch and transformers what corun uses. Loads neither."""
    keep_model_index()
    leave_out_distributed()
    defer_compiler()
