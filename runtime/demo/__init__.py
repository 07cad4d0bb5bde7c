"""The demo that corun serves when no model is named: a tiny language model and four adapters.

Light on purpose: the paths and the unseen examples need neither torch nor transformers.
"""

from pathlib import Path

from .chat import chat_prompt
from .tasks import unseen_examples

__all__ = ["chat_prompt", "demo_adapters_path", "demo_model_path", "unseen_examples"]

_DATA_PATH = Path(__file__).parent / "data"


def demo_model_path() -> Path:
    """Directory of the packaged base model, as ``from_pretrained`` takes it."""
    return _DATA_PATH / "corun-demo"


def demo_adapters_path() -> Path:
    """Directory that holds one PEFT adapter directory per task, named after it."""
    return _DATA_PATH / "adapters"
