"""What does a step ask of a GPU? Launches, waits, copies and bytes, counted without a GPU.

Runs the product's executor over fake CUDA tensors of a model's real size
(`tests/support/triton/counting.py`): 32 rows with a context of 512 tokens, with and without
adapters of ranks 8 to 64, and several ways of sampling. Needs Triton and a C++ compiler. A count is
no time: a GPU's own figures come from `python -m corun.gpu.check`. The last line is JSON.

    python bench/cuda_counts.py [--model llama3-8b --model gemma2-9b]
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.triton.count_steps import MODELS, count_real, counted_gpu


def main() -> None:
    """Print one line for each step, and all figures at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", choices=MODELS)
    models = parser.parse_args().model or list(MODELS)
    counted = {}
    with counted_gpu() as gpu:
        for model in models:
            counted[model] = count_real(gpu, model)
            for step, figures in counted[model].items():
                described = ", ".join(f"{name} {number:,}" for name, number in figures.items())
                print(f"{model}, {step}: {described}", flush=True)
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
