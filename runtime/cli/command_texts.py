"""The commands, and what their help says of them."""

from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")  # that have a completion script

COMMANDS: Mapping[str, str] = {
    "serve": "Serve a base model and its LoRA adapters over the OpenAI API. Without MODEL, serve "
    "the packaged demo model.",
    "cluster": "Serve a base model over several engines behind one URL.",
    "gateway": "Start one more gateway of a cluster that runs on another machine.",
    "cluster status": "Show engines, adapters and CPU cores of a running cluster.",
    "cluster add": "Add engines to a running cluster.",
    "cluster remove": "Remove engines from a running cluster. Last copies of adapters are moved first.",
    "cluster drain": "Let engines of a running cluster finish their requests, then remove them.",
    "check": "Check whether an adapter can be served over a model, without loading weights. With "
    "--quantization, show how much quantization changes the model's predictions.",
    "models": "Try which model classes of the installed transformers are served exactly, with tiny "
    "random models. Needs PEFT.",
    "adapters": "Show where the adapters of a running server or cluster are.",
    "env": "Show versions, devices and limits, for bug reports.",
    "profile": "Measure how fast this machine runs a model.",
    "plan": "Compute the load at which a server keeps its target time to first token, what limits "
    "that load, and what would change it.",
    "simulate": "Simulate engines under a workload, with the scheduler that serves.",
    "completion": "Print a completion script for a shell.",
}

COMMAND_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Serve": ("serve", "cluster", "gateway"),
    "Running clusters": ("cluster status", "cluster add", "cluster remove", "cluster drain"),
    "Inspect": ("check", "models", "adapters", "env"),
    "Measure and plan": ("profile", "plan", "simulate"),
    "Shell": ("completion",),
}

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "serve": (
        ("corun serve", "the demo model and its adapters"),
        ("corun serve Qwen/Qwen2.5-0.5B-Instruct --lora-dir adapters/ --port 8000", ""),
    ),
    "cluster": (
        ("corun cluster Qwen/Qwen2.5-0.5B-Instruct --engines 2 --lora-dir adapters/", ""),
        ("corun cluster --engine http://10.0.0.2:8000 --engine http://10.0.0.3:8000", ""),
    ),
    "gateway": (("corun gateway --controller http://10.0.0.1:9000 --cluster-key-file FILE", ""),),
    "cluster status": (("corun cluster status", ""),),
    "cluster add": (("corun cluster add --engines 1", ""),),
    "cluster remove": (("corun cluster remove ENGINE", ""),),
    "cluster drain": (("corun cluster drain ENGINE", ""),),
    "check": (
        ("corun check adapters/sql --model Qwen/Qwen2.5-0.5B-Instruct", ""),
        ("corun check --model Qwen/Qwen2.5-0.5B-Instruct --quantization int8", ""),
    ),
    "models": (
        ("corun models llama qwen3", "these types"),
        ("corun models --update docs/models.md", "all types: takes up to an hour"),
    ),
    "adapters": (("corun adapters --url http://localhost:8000 --level device", ""),),
    "env": (("corun env", ""),),
    "profile": (("corun profile Qwen/Qwen2.5-0.5B-Instruct", ""),),
    "plan": (("corun plan --workload S1 --slo-ttft-s 2 --rps 20", ""),),
    "simulate": (("corun simulate --workload S1 --rps 4 --compare scheduling-policy=corun,fcfs", ""),),
    "completion": (
        ("source <(corun completion bash)", "bash, for instance in ~/.bashrc"),
        ("source <(corun completion zsh)", "zsh, after compinit"),
        ("corun completion fish | source", "fish"),
    ),
}
