"""Starts and captured passes import no compiler, and later users get the real one."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAVY = ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "torch._inductor", "sympy")


def run(code: str) -> list[str]:
    """Words that a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_start_and_a_captured_pass_import_no_compiler() -> None:
    code = f"""
import sys
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
config = EngineConfig(cpu_threads=1)
build_engine(config, on_progress=lambda _: None, own_process=True).close()
print("heavy", *[name for name in {(*HEAVY, "scipy", "accelerate")} if name in sys.modules])
import torch
from corun.gpu.replay.capture import capture_pass
token = torch.tensor([[1]])
logits, captured = capture_pass(lambda ids, positions: (ids + positions).float(), token, token)
print(logits.item(), type(captured).__name__)
print("heavy", *[name for name in {HEAVY} if name in sys.modules])
"""
    assert run(code) == ["heavy", "2.0", "CapturedPass", "heavy"]


def test_what_asks_for_the_compiler_later_gets_it() -> None:
    code = """
import torch
from corun.gpu.without_compiler import without_compiler
before = torch.distributed.is_available()
with without_compiler():
    from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, vocab_size=8))
compiled = torch.compile(lambda x: model(input_ids=x).logits * 2, backend="eager")
tokens = torch.tensor([[1, 2]])
assert torch.equal(compiled(tokens), model(input_ids=tokens).logits * 2)
assert torch.distributed.is_available() == before
import scipy.optimize, torch.distributed.tensor
print(torch._dynamo.__name__, torch._dynamo.config.__name__)
"""
    assert run(code) == ["torch._dynamo", "torch._dynamo.config"]


def test_what_the_placeholder_lacks_is_the_compilers() -> None:
    code = """
import torch
from corun.gpu.without_compiler import without_compiler
with without_compiler():
    mark = torch.compiler.disable(reason="none")
    assert mark(len) is len and torch.compiler.disable(len) is len
    print(len(torch._dynamo.list_backends()) > 0)
print(torch._dynamo.__file__.endswith("__init__.py"))
"""
    assert run(code) == ["True", "True"]


@pytest.mark.parametrize(
    "statement",
    [
        "from torch._dynamo.utils import counters",
        pytest.param("import torch._dynamo.config", marks=pytest.mark.full),
    ],
)
def test_a_package_that_imports_a_part_of_the_compiler_gets_the_real_one(statement: str) -> None:
    """As torchvision does, which transformers imports where it is installed."""
    code = f"""
import sys
from corun.gpu.without_compiler import without_compiler
with without_compiler():
    from transformers import PreTrainedModel
    {statement}
    import torch._dynamo.utils as within
import torch._dynamo.utils
print(torch._dynamo.utils is within, within is sys.modules["torch._dynamo.utils"])
print(torch._dynamo.__file__.endswith("__init__.py"), within.__spec__.origin == within.__file__)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.tensor(1)).item())
print(not any("corun" in type(finder).__module__ for finder in sys.meta_path))
"""
    assert run(code) == ["True", "True", "True", "True", "2", "True"]


def test_a_package_that_imports_scipy_can_be_imported() -> None:
    """As scikit-learn does, which some versions of transformers import where it is installed.

    And the models are listed once, as transformers itself lists them.
    """
    code = """
from corun.gpu.without_compiler import without_compiler
with without_compiler():
    from transformers.utils import import_utils
    read, num_read = import_utils.create_import_structure_from_path, [0]
    def counted(path):
        num_read[0] += 1
        return read(path)
    import_utils.create_import_structure_from_path = counted
    import transformers.models
    path = import_utils.__file__.replace("utils/import_utils.py", "models/__init__.py")
    listed = import_utils.define_import_structure(path)
    assert num_read == [0]
    from transformers import LlamaForCausalLM
    from scipy.optimize import linear_sum_assignment
from transformers.utils import is_scipy_available
print(linear_sum_assignment([[0.0]])[0].tolist()[0], is_scipy_available())
print(listed == import_utils.define_import_structure(path), num_read[0] > 0, len(listed) > 1)
"""
    assert run(code) == ["0", "True", "True", "True", "True"]


def test_a_list_of_models_is_kept_until_a_file_is_added(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    for name, text in {
        "__init__": """
            from pathlib import Path
            __version__ = "5"
            from .utils.import_utils import define_import_structure
            listed = define_import_structure(Path(__file__).parent / "models", prefix="models")
        """,
        "utils/__init__": "def is_scipy_available(): return False",
        "utils/import_utils": """
            num_read = 0
            def define_import_structure(path, prefix=None):
                global num_read
                num_read += 1
                return {frozenset({"torch"}): {one.stem: {"A", "B"} for one in sorted(path.glob("*/*.py"))}}
        """,
        "models/__init__": "",
        "models/llama/llama": "",
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(tmp_path)!r})
from corun.gpu.without_compiler import without_compiler
kept = Path({str(tmp_path / "kept")!r})
def start():
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    with without_compiler(kept):
        import transformers
        from transformers.utils import import_utils
        own = import_utils.define_import_structure(Path(transformers.__file__).parent / "models/__init__.py")
    ((needed, modules),) = transformers.listed.items()
    assert own == {{needed: {{name.removeprefix("models."): one for name, one in modules.items()}}}}
    assert set(needed) == {{"torch"}} and all(one == {{"A", "B"}} for one in modules.values())
    print(import_utils.num_read, *modules)
start()
start()
new = Path({str(package)!r}, "models/qwen/qwen.py")
new.parent.mkdir()
new.write_text("")
start()
for record in kept.glob("*/*.json"):
    record.write_text("[1]")
start()
"""
    kept, new = ["models.llama"], ["models.llama", "models.qwen"]
    assert run(code) == ["1", *kept, "0", *kept, "1", *new, "1", *new]
