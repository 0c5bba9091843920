"""Is FSDP training correct in every way of running it? Reference runs, FSDP runs, one table.

    python benchmarks/parity_series.py                  # 2 and 4 ranks on the CPU: minutes
    python benchmarks/parity_series.py --where one-gpu  # one rank, the real models

Each run is the real script through the real launcher, with a log of its own in ``--logs-dir``. Runs
whose log is complete are not repeated, so an interrupted series goes on. Then every FSDP
configuration is judged against the references as loss_ablation.py does; the exit status is 1 when
one of them is not equal.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from cli import parse_flags  # noqa: E402
from figures import parity_comparisons, parity_table  # noqa: E402
from run_log import read_run  # noqa: E402

# Micro-batches × rows of the references: they differ in the order of the sums alone.
REFERENCES = ((8, 1), (4, 2), (2, 4))


@dataclass(frozen=True)
class SeriesConfig:
    """Flags of this script."""

    where: Literal["cpu", "one-gpu"] = "cpu"
    """Which series: small models on the CPU, or the real ones on one GPU."""
    logs_dir: Path | None = None
    """Folder of the logs (default: logs/parity/WHERE)."""
    max_minutes: float = 60.0
    """Start no run after this time."""


@dataclass(frozen=True)
class Group:
    """Runs that must be equal: the flags they share, and how FSDP runs them."""

    name: str
    flags: str
    fsdp: dict[str, tuple[int, str]]  # name -> ranks, flags


CPU_FLAGS = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --training-steps 30 "
    "--learning-rate 3e-4 --lr-warmup-steps 10 --logging-frequency 1 --num-workers 0"
)
GPU_FLAGS = "--training-steps 30 --logging-frequency 1"
ONE_RANK = {"1 rank": (1, "--batch-size 4 --grad-accumulation-steps 2")}
# A learning rate that moves most weights within 30 steps even where they are bf16, reached at the
# last step: reached earlier, the first losses jump, and the references part.
BF16_FLAGS = f"{GPU_FLAGS} --sequence-length 1024 --learning-rate 1e-3 --lr-warmup-steps 30"
FULL, SELECTIVE = "--activation-checkpointing full", "--activation-checkpointing selective"
SERIES = {
    "cpu": (
        Group(
            "fp32",
            f"{CPU_FLAGS} --model-dtype fp32",
            {
                "2 ranks": (2, "--batch-size 4"),
                "4 ranks": (4, "--batch-size 2"),
                "2 ranks, accumulation 2": (2, "--batch-size 2 --grad-accumulation-steps 2"),
                "4 ranks, replicas 2": (4, "--batch-size 2 --replicas 2"),
                "2 ranks, CPU offload": (2, "--batch-size 4 --cpu-offload"),
                "2 ranks, no reshard": (2, "--batch-size 4 --no-reshard-after-forward"),
                "2 ranks, checkpointing": (2, "--batch-size 4 --activation-checkpointing full"),
            },
        ),
        Group(
            "fp32 ragged",
            f"{CPU_FLAGS} --model-dtype fp32 --no-packing --dataset tests/data/ragged.parquet",
            {"2 ranks": (2, "--batch-size 4"), "4 ranks": (4, "--batch-size 2")},
        ),
        Group(
            "bf16",
            f"{CPU_FLAGS} --model-dtype bf16 --compute-dtype bf16",
            {
                "2 ranks": (2, "--batch-size 4"),
                "4 ranks, replicas 2": (4, "--batch-size 2 --replicas 2"),
            },
        ),
    ),
    "one-gpu": (
        Group("all 8 bf16", f"{BF16_FLAGS} {FULL} --scaling-factor 8", ONE_RANK),
        Group("n_layers 1 bf16", f"{BF16_FLAGS} {FULL} --scaling-strategy n_layers", ONE_RANK),
        Group(
            "all 8 fp32",
            f"{GPU_FLAGS} {FULL} --scaling-factor 8 --sequence-length 128 --learning-rate 2e-4"
            " --model-dtype fp32 --compute-dtype fp32",
            {"1 rank": (1, "--batch-size 1 --grad-accumulation-steps 8")},
        ),
        Group(
            "all 2 bf16",
            f"{BF16_FLAGS} --scaling-factor 2",
            {
                "compiled": (1, "--batch-size 4 --grad-accumulation-steps 2"),
                "compiled selective": (1, f"--batch-size 8 {SELECTIVE}"),
                "compiled full": (1, f"--batch-size 8 {FULL}"),
                "selective": (1, f"--batch-size 8 --no-compile {SELECTIVE}"),
            },
        ),
    ),
}


def runs_of(group: Group) -> dict[str, list[str]]:
    """Command of each run of a group, by the name of its log."""
    flags = group.flags.split()
    commands = {}
    for micro_batches, rows in REFERENCES:
        shape = ["--batch-size", str(rows), "--grad-accumulation-steps", str(micro_batches)]
        name = f"reference {micro_batches}x{rows}"
        commands[name] = [sys.executable, "train.py", *flags, *shape]
    for name, (ranks, more) in group.fsdp.items():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(ranks), "train_fsdp.py"]
        commands[f"fsdp {name}"] = [*launch, *flags, *more.split()]
    return commands


def log_path(folder: Path, group: Group, name: str) -> Path:
    """Log of one run."""
    return folder / f"{group.name} {name}.out".replace(",", "").replace(" ", "_")


def log_environment() -> dict[str, str]:
    """One thread per rank, so that the order of sums inside an operation is the same everywhere."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def run_if_missing(command: list[str], log: Path) -> None:
    """Run a command unless its log says that it completed."""
    if log.exists() and read_run(log).status == "completed":
        return
    log.unlink(missing_ok=True)
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--log-file", os.path.relpath(log, REPOSITORY)],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        env=log_environment(),
    )
    print(f"{log.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    if done.returncode:
        sys.exit(f"{log.name} failed with status {done.returncode}")


def main(config: SeriesConfig) -> int:
    """Make the missing runs, print the table."""
    groups = SERIES[config.where]
    folder = config.logs_dir or REPOSITORY / "logs" / "parity" / config.where
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for group in groups:
        for name, command in runs_of(group).items():
            if time.monotonic() - started > 60 * config.max_minutes:
                sys.exit("out of time: run again to go on")
            run_if_missing(command, log_path(folder, group, name))
    print(parity_table(folder))
    comparisons = parity_comparisons(folder)
    complete = len(comparisons) == sum(len(group.fsdp) for group in groups)
    return 0 if complete and all(found.verdict == "equal" for _, found in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main(parse_flags(SeriesConfig)))
