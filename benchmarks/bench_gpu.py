"""How fast is train.py on this GPU, and how close to what its matmuls can do?

    python benchmarks/bench_gpu.py --output-dir logs/published/h200/bench

First the sustained rate of a large bf16 matmul (the ceiling), then train.py at each shape, with its
defaults. A shape is one process: after the warm-up its log has three windows of equal length, whose
median and spread are reported. Shapes whose log is complete are not repeated. Writes ceiling.json
and bench.md beside the logs; the JSON of each run is its log.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from cli import parse_flags, refuse  # noqa: E402
from figures import bench_table  # noqa: E402
from run_log import read_run  # noqa: E402

METHOD_VERSION = 1
NUM_WINDOWS = 3


@dataclass(frozen=True)
class BenchConfig:
    """Flags of this script."""

    output_dir: Path = Path("logs/bench_gpu")
    """Folder of the logs and results."""
    max_minutes: float = 30.0
    """Start no shape after this time; run again to go on."""


@dataclass(frozen=True)
class Shape:
    """One row of the table. A window is long enough to last over a second."""

    strategy: str
    factor: int
    batch_size: int
    window_steps: int

    @property
    def name(self) -> str:
        """Name of the log."""
        return f"{self.strategy}_{self.factor}_batch_{self.batch_size}"


SHAPES = (
    Shape("all", 2, 1, 100),
    Shape("all", 2, 8, 20),
    Shape("all", 8, 1, 10),
    Shape("all", 8, 4, 10),
    Shape("n_layers", 1, 1, 10),
    Shape("n_layers", 1, 2, 10),
    Shape("all", 11, 1, 10),
)


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
        "tflops": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "size": size,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def gpu_state() -> str:
    """Clock, temperature and power of the GPU, as nvidia-smi says them."""
    query = "--query-gpu=clocks.sm,temperature.gpu,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def run_shape(shape: Shape, log: Path) -> None:
    """Train at one shape, unless its log says that this was done."""
    if log.exists() and read_run(log).end is not None:
        return
    log.unlink(missing_ok=True)
    flags = f"--scaling-strategy {shape.strategy} --scaling-factor {shape.factor} --no-digest"
    flags += f" --batch-size {shape.batch_size} --logging-frequency {shape.window_steps}"
    flags += f" --training-steps {(NUM_WINDOWS + 1) * shape.window_steps} --learning-rate 5e-5"
    command = [
        sys.executable,
        "train.py",
        *flags.split(),
        "--log-file",
        os.path.relpath(log, REPOSITORY),
    ]
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    print(f"{shape.name}: {gpu_state()}", file=sys.stderr)


def main(config: BenchConfig) -> None:
    """Measure the ceiling and all shapes that time allows; write and print the table."""
    import torch

    if not torch.cuda.is_available():
        refuse("this benchmark needs a GPU, and torch sees none")
    started = time.monotonic()
    folder = config.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    ceiling_file = folder / "ceiling.json"
    if not ceiling_file.exists():
        ceiling_file.write_text(json.dumps(measure_ceiling() | {"method": METHOD_VERSION}) + "\n")
        torch.cuda.empty_cache()
    for shape in SHAPES:
        if time.monotonic() - started < 60 * config.max_minutes:
            run_shape(shape, folder / f"{shape.name}.out")
    table = bench_table(folder)
    (folder / "bench.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main(parse_flags(BenchConfig))
