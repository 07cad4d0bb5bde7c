"""An adapter of finite numbers with answers that are not finite, which no check of files finds."""

import shutil
from pathlib import Path

from corun.runtime.demo import demo_adapters_path
from safetensors.torch import load_file, save_file

_HUGE = 3.0e38  # finite in bfloat16 and float32; its product with anything above one is not
_WEIGHTS = "adapter_model.safetensors"


def make_overflowing(directory: Path) -> Path:
    """Write one, made of the demo's ``upper``, and return ``directory``."""
    shutil.copytree(demo_adapters_path() / "upper", directory)
    tensors = load_file(directory / _WEIGHTS)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.fill_(_HUGE)
    save_file(tensors, directory / _WEIGHTS)
    return directory
