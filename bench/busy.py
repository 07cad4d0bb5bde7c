"""How do a server and other programs on the same machine affect each other?

``corun serve`` over HTTP, after every adapter has been read, in several variants that take turns:
with default options, with fixed numbers of threads, the same from another checkout (``--against``),
and another project's server (``--peer``). Parts, each for weights in bfloat16, 8 and 4 bits:

    speed    1, 8 and 16 clients, over the other checkout
    reading  the gap of one request over a plain read of the weights (bfloat16)
    replay   decode steps that are replayed, over those that are not
    busy     8 requests and one stream, quiet, beside one and two spinning processes per core, and
             in a control group with a quota of 1.5 CPUs
    again    the time to full speed after competitors have ended
    start    servers that start beside competitors, compared with a quiet start after they end
    gaps     8 clients with prompts of 1,024 tokens: gaps and rate, with the default of
             --max-decode-gap-s and with no bound (bfloat16)

Figures are stored in a file. An interrupted run continues, and repeats measurements that other
programs disturbed. The last line is JSON.

    python bench/busy.py --against ../corun-before [--parts speed busy] [--kinds bfloat16]
    python bench/busy.py --peer "bfloat16=llama-server -m model.gguf --port {port} -t 2"
    python bench/busy.py --size 1b --kinds bfloat16 int4
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from models import SIZES, make_adapters, save_model
from neighbours.cells import (
    Figures,
    Kept,
    Pace,
    loads,
    long_prompts,
    over_reading,
    quiet_again,
    started_under_load,
)
from neighbours.competitors import quota, spinning
from neighbours.servers import LOADS, Servers, Variant
from neighbours.verdicts import QUOTA, cell_name, verdicts
from paired import report, setup
from safetensors import safe_open
from transformers import LlamaConfig

KINDS = ("bfloat16", "int8", "int4")
_SPINNERS_PER_CORE = (0, 1, 2)
_BUSY_LOADS = (8, 1)
_QUOTA_CPUS = 1.5
_WARM_S = 2.0
_WORDS = {True: "met         ", False: "MISSED      ", None: "inconclusive"}
_QUICK = Pace(
    rounds=1,
    pairs=1,
    settle_s=0.5,
    window_s=2.0,
    watch_s=6.0,
    watch_window_s=2.0,
    recovery_s=2.0,
    starts=1,
    long_requests=8,
)
_RESULTS = Path(__file__).parent / "results" / "busy"


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, on which model."""

    pace: Pace
    kept: Kept
    folder: Path  # has model and adapters
    vocab_size: int
    against: Path | None  # a folder in which corun is a link to the other checkout
    peers: Mapping[str, str]  # commands by kind
    peer_fields: str

    def servers(self, kind: str, *prefix: str) -> Servers:
        """Of one kind of weights; none runs yet."""
        shared = ("--memory-gib", "1", "--watch-lora-dir", "off")
        auto = Variant(shared if kind == KINDS[0] else (*shared, "--quantization", kind))
        variants = {
            "auto": auto,
            "no replay": with_options(auto, "--decode-graphs", "off"),
            "unbounded": with_options(auto, "--max-decode-gap-s", "86400"),
            "against": replace(auto, tree=self.against),
            "peer": Variant(peer_command=self.peers.get(kind), peer_fields=self.peer_fields),
        }
        for number in sorted({1, num_cpus()}):
            variants[f"threads {number}"] = with_options(
                auto, "--cpu-threads", str(number), "--fixed-cpu-threads"
            )
        return Servers(self.folder / "model", self.folder / "adapters", self.vocab_size, variants, prefix)

    def compared(self, kind: str) -> list[str]:
        """The servers of a busy cell."""
        names = ["auto", *(f"threads {number}" for number in sorted({1, num_cpus()}))]
        names += ["against"] if self.against is not None else []
        return names + (["peer"] if kind in self.peers else [])


def with_options(variant: Variant, *options: str) -> Variant:
    """The same with more options."""
    return replace(variant, options=(*variant.options, *options))


def num_cpus() -> int:
    """CPUs of this process."""
    return len(os.sched_getaffinity(0))


def measure_loads(
    bench: Bench,
    servers: Servers,
    name: str,
    compared: Mapping[str, str],
    clients: int,
    *,
    rounds: int,
    settle_s: float,
) -> None:
    """One cell, if it is not kept. ``compared``: servers by what they are called there."""

    def measure() -> Figures:
        running = {label: servers[variant] for label, variant in compared.items()}
        return loads(running, clients, rounds, replace(bench.pace, settle_s=settle_s))

    bench.kept.cell(name, measure)


def measure_speed(bench: Bench, kind: str, servers: Servers) -> None:
    """Over the other checkout, and twice as control."""
    compared = {"auto": "auto", "against": "against", "auto again": "auto"}
    if bench.against is None:
        del compared["against"]
    for clients in LOADS:
        measure_loads(
            bench,
            servers,
            cell_name("speed", kind, clients),
            compared,
            clients,
            rounds=bench.pace.pairs,
            settle_s=_WARM_S,
        )


def measure_reading(bench: Bench, kind: str, servers: Servers) -> None:
    """Against reading the weights that a step reads."""
    if kind == KINDS[0]:
        num_bytes = weight_bytes(bench.folder / "model")
        bench.kept.cell(
            cell_name("reading", kind), lambda: over_reading(servers["auto"], num_bytes, bench.pace)
        )


def measure_replay(bench: Bench, kind: str, servers: Servers) -> None:
    """Of decode steps."""
    compared = {"auto": "auto", "no replay": "no replay", "auto again": "auto"}
    for clients in _BUSY_LOADS:
        measure_loads(
            bench,
            servers,
            cell_name("replay", kind, clients),
            compared,
            clients,
            rounds=bench.pace.pairs,
            settle_s=_WARM_S,
        )


def measure_busy(bench: Bench, kind: str, servers: Servers) -> None:
    """Beside spinning processes, and in a group with a quota."""
    compared = {name: name for name in bench.compared(kind)}

    def measure(servers: Servers, beside: object) -> None:
        for clients in _BUSY_LOADS:
            measure_loads(
                bench,
                servers,
                cell_name("busy", kind, beside, clients),
                compared,
                clients,
                rounds=bench.pace.rounds,
                settle_s=bench.pace.settle_s,
            )

    for name in compared:  # no start beside competitors
        servers[name]
    for per_core in _SPINNERS_PER_CORE:
        with spinning(per_core):
            measure(servers, per_core)
    servers.end()  # the group's have the memory
    try:
        with quota(_QUOTA_CPUS) as prefix, bench.servers(kind, *prefix) as limited:
            measure(limited, QUOTA)
    except OSError as error:
        print(f"{cell_name('busy', kind, QUOTA)}: skipped, {error}", flush=True)


def measure_again(bench: Bench, kind: str, servers: Servers) -> None:
    """Until full speed."""
    bench.kept.cell(cell_name("again", kind), lambda: quiet_again(servers["auto"], 8, bench.pace))


def measure_starts(bench: Bench, kind: str, servers: Servers) -> None:
    """Of servers that find nothing kept but compiled kernels."""
    for number in range(bench.pace.starts):

        def measure() -> Figures:
            with tempfile.TemporaryDirectory() as state:
                variant = replace(servers.variants["auto"], state=Path(state))
                return started_under_load(servers, variant, servers["auto"], bench.pace)

        bench.kept.cell(cell_name("start", kind, number), measure)


def measure_gaps(bench: Bench, kind: str, servers: Servers) -> None:
    """Beside long prompts."""
    if kind == KINDS[0]:
        bench.kept.cell(
            cell_name("gaps", kind),
            lambda: long_prompts({name: servers[name] for name in ("auto", "unbounded")}, bench.pace),
        )


PARTS: Mapping[str, Callable[[Bench, str, Servers], None]] = {
    "speed": measure_speed,
    "reading": measure_reading,
    "replay": measure_replay,
    "busy": measure_busy,
    "again": measure_again,
    "start": measure_starts,
    "gaps": measure_gaps,
}


def weight_bytes(model: Path) -> int:
    """Of what a decode step reads: everything but the embedding, unless the head is tied to it."""
    is_tied = LlamaConfig.from_pretrained(model).tie_word_embeddings
    num_bytes = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if is_tied or "embed_tokens" not in name:
                    num_bytes += file.get_tensor(name).nbytes
    return num_bytes


def make_files(folder: Path, config: LlamaConfig) -> None:
    """Model and adapters, if they are not there."""
    if not (folder / "adapters").exists():
        save_model(config, folder / "model")
        make_adapters(folder / "model", folder / "adapters")


@contextlib.contextmanager
def linked(checkout: Path | None) -> Iterator[Path | None]:
    """A folder in which ``checkout`` can be imported as corun."""
    if checkout is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corun").symlink_to(checkout.resolve())
        yield Path(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--size", choices=SIZES, default="150m", help="size of the model")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of corun")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="KIND=COMMAND",
        help="another project's server for a kind of weights, ready when /health answers",
    )
    parser.add_argument(
        "--peer-fields",
        default="{}",
        metavar="JSON",
        help="extra fields of requests to it; ADAPTER = the adapter's number",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds of each cell, and pairs of each ratio"
    )
    parser.add_argument("--quick", action="store_true", help="seconds per cell, to try the script")
    parser.add_argument("--results", type=Path, help="file of figures")
    parser.add_argument("--folder", type=Path, default=_RESULTS, help="folder of models and results")
    return parser.parse_args()


def main() -> None:
    """Measure what is not kept, judge and print."""
    options = _options()
    pace = _QUICK if options.quick else Pace()
    if options.rounds is not None:
        pace = replace(pace, rounds=options.rounds, pairs=options.rounds)
    machine = {name: value for name, value in setup().items() if name != "date"}
    other = None if options.against is None else setup(options.against)["commit"]
    results = options.results or options.folder / f"{options.size}-{machine['commit']}.json"
    if options.quick and options.results is None:
        results = results.with_stem(f"{results.stem}-quick")
    folder = options.folder / "models" / options.size
    config = SIZES[options.size]
    make_files(folder, config)
    kept = Kept(results, {"setup": machine, "against": other, "size": options.size} | asdict(pace))
    peers = dict(peer.split("=", 1) for peer in options.peer)
    with linked(options.against) as against:
        bench = Bench(pace, kept, folder, config.vocab_size, against, peers, options.peer_fields)
        for kind in options.kinds:
            with bench.servers(kind) as servers:
                for part in (part for part in PARTS if part in options.parts):
                    PARTS[part](bench, kind, servers)
    bounds = verdicts(kept.cells)
    for said, is_met in bounds.items():
        print(f"{_WORDS[is_met]}  {said}")
    workload = {"size": options.size, "against": other, "peers": peers}
    report("busy", workload | asdict(pace), kept.cells, bounds)


if __name__ == "__main__":
    main()
