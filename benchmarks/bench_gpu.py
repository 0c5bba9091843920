"""How fast is train.py on this GPU, and how close to what its matmuls can do?

    python benchmarks/bench_gpu.py --output-dir logs/published/h200/bench

First the sustained rate of a large bf16 matmul (the ceiling), then train.py at each shape, with its
defaults. A shape is one process: after the warm-up its log has three windows of equal length, whose
median and spread are reported. Shapes whose log is complete are not repeated. Beside the logs it
writes ceiling.json and gpu_states.txt (clock, temperature and power after each shape), and prints
the table.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import parse_flags, refuse
from figures import bench_table
from make_logs import make_logs, run_script

METHOD_VERSION = 1
NUM_WINDOWS = 3


@dataclass(frozen=True)
class BenchConfig:
    """Measure the speed of train.py on this GPU."""

    output_dir: Path = Path("logs/bench_gpu")
    """Folder of the logs and results."""
    max_minutes: float = 30.0
    """Start no shape after this time; run again to go on."""


# Strategy, factor, rows, and the steps of a window, which are enough to last over a second.
SHAPES = (("all", 1, 1, 200), ("all", 2, 1, 100), ("all", 2, 8, 20), ("all", 8, 1, 10),
          ("all", 8, 4, 10), ("n_layers", 1, 1, 10), ("n_layers", 1, 2, 10),
          ("all", 11, 1, 10))  # fmt: skip


def measure_ceiling(seconds: float = 5.0, size: int = 8192) -> dict[str, Any]:
    """Sustained TFLOP/s of a square bf16 matmul of random numbers: median over half-seconds."""
    import torch

    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates, repeats = [], 200
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            torch.mm(left, right)
        end.record()
        end.synchronize()
        rates.append(repeats * 2 * size**3 / (begin.elapsed_time(end) * 1e-3) / 1e12)
    rates = rates[1:]  # the first holds the library's start
    return {
        "tflops": statistics.median(rates), "lowest": min(rates), "highest": max(rates),
        "size": size, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip


def gpu_state() -> str:
    """Clock, temperature and power of the GPU, as nvidia-smi says them."""
    query = "--query-gpu=clocks.sm,temperature.gpu,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def train_shape(strategy: str, factor: int, batch_size: int, window: int, log: Path) -> str:
    """Train at one shape; how it ended, and the state of the GPU after it, which is also kept."""
    flags = f"--scaling-strategy {strategy} --scaling-factor {factor} --no-digest"
    flags += f" --batch-size {batch_size} --logging-frequency {window} --learning-rate 5e-5"
    flags += f" --training-steps {(NUM_WINDOWS + 1) * window}"
    how, state = run_script(["train.py", *flags.split()], log), gpu_state()
    with (log.parent / "gpu_states.txt").open("a") as states:
        states.write(f"{log.stem}: {state}\n")
    return f"{how}: {state}"


def main(config: BenchConfig) -> None:
    """Measure the ceiling and all shapes that time allows; print the table."""
    import torch

    if not torch.cuda.is_available():
        refuse("this benchmark needs a GPU, and torch sees none")
    folder = config.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    ceiling_file = folder / "ceiling.json"
    if not ceiling_file.exists():
        ceiling_file.write_text(json.dumps(measure_ceiling() | {"method": METHOD_VERSION}) + "\n")
        torch.cuda.empty_cache()
    makers = {"{}_{}_batch_{}".format(*shape): partial(train_shape, *shape) for shape in SHAPES}
    make_logs(makers, folder, max_minutes=config.max_minutes)
    print(bench_table(folder) or "no shape was measured")


if __name__ == "__main__":
    main(parse_flags(BenchConfig))
