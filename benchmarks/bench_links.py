"""What does the link between two GPUs cost: the time of FSDP's collectives, and of a step?

    python benchmarks/bench_links.py --output-dir logs/published/h200/links

For each way that NCCL can be made to take (NVLink, its default; shared memory of the host; sockets
on loopback, a stand-in for a slow network): an all-gather, an all-to-all and a reduce-scatter of
the sizes that FSDP uses, and train_fsdp.py at four sizes; and those four with a second rank that
does not exist, where nothing travels (simulated_train.py). A log each in ``--output-dir``; what is
complete is not repeated, so an interrupted series goes on.

A ``Link:`` record holds the median seconds of a collective over windows of calls, and the bus
bandwidth, (n-1)/n × bytes of the whole tensor ÷ seconds for n ranks: what each link of a ring
carries (nccl-tests, doc/PERFORMANCE.md).
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis import find_logs
from cli import parse_flags, refuse
from distributed import World, leave, sharded_world
from links import MESSAGE_SHAPES, METHOD_VERSION, SHAPES, TRANSPORTS, check_measured
from make_logs import make_logs, run_script
from memory import MODEL_VOCAB_SIZE
from model_config import build_config, count_block_params
from run_log import SCHEMA_VERSION, LogWriter, blaming, read_run
from utils import device_name, nccl_environment, source_version, synchronize, versions

NUM_WINDOWS = 5
WINDOW_S = 0.02
NUM_RANKS = 2
# Steps between the log lines of each shape; where gigabytes go through sockets, fewer. The first of
# four such windows is the warm-up.
WINDOW_STEPS, WINDOW_STEPS_SOCKETS = (20, 6, 4, 4), (4, 2, 1, 1)

TINY_FLAGS = "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64"


@dataclass(frozen=True)
class BenchConfig:
    """Measure what the link between two GPUs costs."""

    output_dir: Path | None = None
    """Folder of the logs (default: logs/bench_links, or logs/bench_links_tiny)."""
    max_minutes: float = 30.0
    """Start nothing after this time; run again to go on."""
    only: str = ""
    """Make only the logs with this in their name: bandwidth, simulated, NVLink, all_10, …"""
    tiny: bool = False
    """Messages and a model small enough for a CPU (gloo), to see that all of it runs."""
    measure: Path | None = None
    """Time the collectives (for the ranks that this script starts), in this log."""

    @property
    def folder(self) -> Path:
        """Of the logs; those of a small series must not be taken for those of the real one."""
        return self.output_dir or Path(f"logs/bench_links{'_tiny' * self.tiny}")


def message_sizes(tiny: bool) -> dict[int, str]:
    """Elements of a collective -> the group of parameters that has as many; and powers of two."""
    sizes = {2**power: f"2^{power}" for power in range(16, 19 if tiny else 27, 2)}
    for strategy, factor in () if tiny else MESSAGE_SHAPES:
        shape = build_config(strategy, factor, MODEL_VOCAB_SIZE)
        sizes[count_block_params(shape)] = f"{strategy} {factor} block"
        sizes[shape.vocab_size * shape.dim] = f"{strategy} {factor} embedding, head"
    return dict(sorted(sizes.items()))


def time_calls(call: Callable[[], object], world: World) -> list[float]:
    """Seconds of a call, in each window."""

    def window(num_calls: int) -> float:
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        synchronize(world.device)
        return (time.perf_counter() - started) / num_calls

    window(1)  # makes the connections
    [slowest_s] = world.max_host([window(2)])  # ranks must make equally many calls
    num_calls = max(1, min(200, int(WINDOW_S / slowest_s)))
    return [window(num_calls) for _ in range(NUM_WINDOWS)]


def time_collective(name: str, dtype: torch.dtype, numel: int, world: World) -> dict[str, Any]:
    """Fields of a ``Link:`` record; ``numel`` counts the elements of all ranks together."""
    local = torch.zeros(numel // world.size, dtype=dtype, device=world.device)
    whole = local.repeat(world.size)
    received = torch.empty_like(whole)
    call = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, local),
        "all_to_all": lambda: dist.all_to_all_single(received, whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(local, whole),
    }[name]
    seconds = time_calls(call, world)
    median_s, num_bytes = statistics.median(seconds), whole.numel() * whole.itemsize
    return {
        "collective": name, "dtype": str(dtype).removeprefix("torch."), "bytes": num_bytes,
        "median_s": median_s, "lowest_s": min(seconds), "highest_s": max(seconds),
        "bus_gb_per_s": (1 - 1 / world.size) * num_bytes / median_s / 1e9,
    }  # fmt: skip


def measure(log: LogWriter, tiny: bool) -> None:
    """Time every collective on all ranks that torchrun started; rank 0 writes the log."""
    # What FSDP gathers, exchanges within a node and reduces across nodes (distributed.shard).
    kinds = (("all_gather", torch.bfloat16), ("all_to_all", torch.bfloat16),
             ("reduce_scatter", torch.float32))  # fmt: skip
    with sharded_world(replicas=1) as world:
        if is_first := world.rank == 0:
            log.record("Run", {
                "schema": SCHEMA_VERSION, "script": "bench_links.py", "method": METHOD_VERSION,
                "num_windows": NUM_WINDOWS, "tiny": tiny, "world_size": world.size,
                "device": device_name(world.device), "device_type": world.device.type,
                "nccl_environment": nccl_environment(), "versions": versions(), **source_version(),
            })  # fmt: skip
        for numel, group in message_sizes(tiny).items():
            for name, dtype in kinds:
                result = time_collective(name, dtype, numel, world)
                if is_first:
                    log.record("Link", {"group": group, **result})
        if is_first:
            log.record("End", {"status": "completed"})
    leave("completed")


def plan(tiny: bool) -> dict[str, Callable[[Path], str]]:
    """What makes each log, by name, in order."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    shapes = (("all", 1),) if tiny else SHAPES
    own = [*launch, "benchmarks/bench_links.py", *["--tiny"] * tiny]
    makers: dict[str, Callable[[Path], str]] = {
        f"bandwidth {name}": partial(run_script, own, log_flag="--measure", environment=environment)
        for name, environment in TRANSPORTS.items()
    }
    for name, environment in {"simulated": {"WORLD_SIZE": str(NUM_RANKS)}, **TRANSPORTS}.items():
        alone = name == "simulated"
        script = ["benchmarks/simulated_train.py"] if alone else [*launch, "train_fsdp.py"]
        windows = WINDOW_STEPS_SOCKETS if tiny or "sockets" in name else WINDOW_STEPS
        for (strategy, factor), window in zip(shapes, windows, strict=False):
            flags = f"--scaling-strategy {strategy} --scaling-factor {factor} --no-digest"
            flags += f" --logging-frequency {window} --training-steps {4 * window}"
            words = [*script, *flags.split(), *(TINY_FLAGS.split() if tiny else ())]
            make = partial(run_script, words, environment=environment)
            makers[f"{name} {strategy} {factor}"] = make
    return {name.replace(" ", "_"): make for name, make in makers.items()}


def check_logs(folder: Path) -> None:
    """End where a log stands in a folder of the real series that is not of it."""
    try:
        for path in find_logs(folder):
            with blaming(path):
                if (record := read_run(path).run) is not None:
                    check_measured(record)
    except ValueError as error:
        refuse(error)


def main(config: BenchConfig) -> None:
    """Make all logs that time allows; or, as one of the ranks, time the collectives."""
    if config.measure is not None:
        measure(LogWriter(config.measure), config.tiny)
        return
    makers = {name: make for name, make in plan(config.tiny).items() if config.only in name}
    if not config.tiny:
        check_logs(config.folder)
        if torch.cuda.device_count() < NUM_RANKS:
            refuse("this benchmark needs two GPUs; --tiny runs it on a CPU")
    make_logs(makers, config.folder, max_minutes=config.max_minutes)


if __name__ == "__main__":
    main(parse_flags(BenchConfig))
