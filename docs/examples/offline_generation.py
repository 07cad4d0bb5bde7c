"""Generate text in this process, with and without an adapter, in one batch."""

from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.demo import chat_prompt, demo_adapters_path, demo_model_path

upper = LoRARequest("upper", 1, str(demo_adapters_path() / "upper"))
with Engine(model=str(demo_model_path()), device="cpu") as engine:
    prompts = [chat_prompt("hello world")] * 2
    params = SamplingParams(temperature=0, max_tokens=32)
    outputs = engine.generate(prompts, params, [None, upper])
    for output in outputs:
        print(output.outputs[0].text)  # You said: hello world, then HELLO WORLD
