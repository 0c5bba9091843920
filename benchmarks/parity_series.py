"""Is FSDP training correct in every way of running it? Reference runs, FSDP runs, one table.

    python benchmarks/parity_series.py                   # 2 and 4 ranks on the CPU: minutes
    python benchmarks/parity_series.py --where one-gpu   # one rank, the real models
    python benchmarks/parity_series.py --where two-gpus  # two ranks, the same references

Each run is the real script through the real launcher, with a log of its own in ``--logs-dir``,
which has its name once the run is complete. Runs that have a log are not repeated, so an
interrupted series goes on, and the two series on GPUs share their references; one series at a time
writes there. Then every FSDP configuration is judged against the references as loss_ablation.py
does; the exit status is 1 when a run is missing or one of them is not equal.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from cli import check_flags, parse_flags, refuse  # noqa: E402
from figures import parity_comparisons, parity_table  # noqa: E402
from processes import lock_folder, tied  # noqa: E402
from run_log import RunLog, read_runs  # noqa: E402

# Micro-batches × rows of the references: they differ in the order of the sums alone.
REFERENCES = ((8, 1), (4, 2), (2, 4))
# And all rows at once, as FSDP takes its own: added up in bf16 they make less of a spike (LOG.md).
WHOLE = (*REFERENCES, (1, 8))


@dataclass(frozen=True)
class SeriesConfig:
    """Run FSDP in every way, and without it, and judge whether they are equal."""

    where: Literal["cpu", "one-gpu", "two-gpus"] = "cpu"
    """Which series: small models on the CPU, or the real ones on one GPU or two."""
    logs_dir: Path | None = None
    """Folder of the logs (default: logs/parity/cpu or logs/parity/gpu)."""
    max_minutes: float = 60.0
    """Start no run after this time."""
    jobs: int = 1
    """How many runs at once: their results count, not their speed."""

    def __post_init__(self) -> None:
        check_flags(self, "jobs", "be at least 1", lambda jobs: jobs >= 1)


@dataclass(frozen=True)
class Group:
    """Runs that must be equal: the flags they share, and how FSDP runs them (of WAYS)."""

    name: str
    flags: str
    ways: tuple[str, ...]
    references: tuple[tuple[int, int], ...] = REFERENCES


CPU_FLAGS = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --training-steps 30 "
    "--learning-rate 3e-4 --lr-warmup-steps 10 --logging-frequency 1 --num-workers 0"
)
FULL, SELECTIVE = "--activation-checkpointing full", "--activation-checkpointing selective"
GPU_FLAGS = "--training-steps 30 --logging-frequency 1"
# Rates at which the references stay together, and as many weights move as that allows: bf16 rounds
# small updates away, large ones end in jumps of the loss, and wide models jump first (LOG.md).
BF16_FLAGS = f"{GPU_FLAGS} --sequence-length 1024"
FP32_FLAGS = (
    f"{GPU_FLAGS} --sequence-length 128 --learning-rate 2e-4 --model-dtype fp32 "
    "--compute-dtype fp32"
)
ALL_8_BF16 = (
    "all 8 bf16",
    f"{BF16_FLAGS} {FULL} --scaling-factor 8 --learning-rate 6e-4 --lr-warmup-steps 10",
)
N_LAYERS_1_BF16 = (
    "n_layers 1 bf16",
    f"{BF16_FLAGS} {FULL} --scaling-strategy n_layers --learning-rate 5e-5 --lr-warmup-steps 30",
)
ALL_8_FP32 = ("all 8 fp32", f"{FP32_FLAGS} {FULL} --scaling-factor 8")
# Ranks and flags of each way to run FSDP; of one that is resumed, of each part.
WAYS = {
    "1 rank": [(1, "--batch-size 4 --grad-accumulation-steps 2")],
    "1 rank, CPU offload": [(1, "--batch-size 4 --grad-accumulation-steps 2 --cpu-offload")],
    "2 ranks": [(2, "--batch-size 4")],
    "4 ranks": [(4, "--batch-size 2")],
    "2 ranks, accumulation 2": [(2, "--batch-size 2 --grad-accumulation-steps 2")],
    "2 ranks, replicas 2": [(2, "--batch-size 4 --replicas 2")],
    "4 ranks, replicas 2": [(4, "--batch-size 2 --replicas 2")],
    "2 ranks, CPU offload": [(2, "--batch-size 4 --cpu-offload")],
    "2 ranks, no reshard": [(2, "--batch-size 4 --no-reshard-after-forward")],
    "2 ranks, checkpointing": [(2, f"--batch-size 4 {FULL}")],
    "2 to 1 to 2 ranks": [
        (2, "--batch-size 4 --training-steps 10"),
        (1, "--batch-size 4 --grad-accumulation-steps 2 --training-steps 20"),
        (2, "--batch-size 4"),
    ],
    "compiled": [(1, "--batch-size 4 --grad-accumulation-steps 2")],
    "compiled selective": [(1, f"--batch-size 8 {SELECTIVE}")],
    "compiled full": [(1, f"--batch-size 8 {FULL}")],
    "selective": [(1, f"--batch-size 8 --no-compile {SELECTIVE}")],
}
SERIES = {
    "cpu": (
        Group("fp32", f"{CPU_FLAGS} --model-dtype fp32", (
            "2 ranks", "4 ranks", "2 ranks, accumulation 2", "4 ranks, replicas 2",
            "2 ranks, CPU offload", "2 ranks, no reshard", "2 ranks, checkpointing",
            "2 to 1 to 2 ranks")),
        Group("fp32 ragged", f"{CPU_FLAGS} --model-dtype fp32 --no-packing "
              "--dataset tests/data/ragged.parquet", ("2 ranks", "4 ranks")),
        Group("bf16", f"{CPU_FLAGS} --model-dtype bf16 --compute-dtype bf16",
              ("2 ranks", "4 ranks", "4 ranks, replicas 2")),
    ),
    "one-gpu": (
        Group(*ALL_8_BF16, ("1 rank", "1 rank, CPU offload"), WHOLE),
        Group(*N_LAYERS_1_BF16, ("1 rank",)),
        Group(*ALL_8_FP32, ("1 rank", "1 rank, CPU offload")),
        Group("all 2 bf16",
              f"{BF16_FLAGS} --scaling-factor 2 --learning-rate 3e-4 --lr-warmup-steps 10",
              ("compiled", "compiled selective", "compiled full", "selective"), WHOLE),
    ),
    "two-gpus": (
        Group(*ALL_8_BF16, ("2 ranks", "2 ranks, no reshard", "2 ranks, replicas 2",
                            "2 ranks, CPU offload", "2 to 1 to 2 ranks"), WHOLE),
        Group(*N_LAYERS_1_BF16, ("2 ranks", "2 ranks, no reshard")),
        Group(*ALL_8_FP32, ("2 ranks",)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run on its way to its log; of its commands, each starts when the one before is done."""

    log: Path
    commands: list[list[str]]

    @property
    def unfinished_log(self) -> Path:
        """Its log until the last command is done; one that is cut short is no evidence."""
        return self.log.with_suffix(".unfinished")

    @property
    def saved(self) -> Path:
        """Folder of its checkpoints."""
        return self.log.with_suffix(".saved")

    @property
    def is_complete(self) -> bool:
        """Whether its log is there and whole. Raises ValueError where something else stands."""
        for log in (self.log, self.unfinished_log):
            if log.exists() and not log.is_file():
                raise ValueError(f"{log} is not a regular file; move it away")
        return is_whole(self.log, len(self.commands))

    def make(self, call: Callable[[list[str]], int]) -> str:
        """Begin anew and call each command, which gives its status; how it went, in words."""
        shutil.rmtree(self.saved, ignore_errors=True)
        for log in (self.log, self.unfinished_log):
            log.unlink(missing_ok=True)
        log_flag = ["--log-file", os.path.relpath(self.unfinished_log, REPOSITORY)]
        try:
            for num_attempts, command in enumerate(self.commands, start=1):
                if status := call([*command, *log_flag]):
                    return f"failed with status {status} (see {self.unfinished_log})"
                # A log that is cut by a full disk fails no training.
                if not is_whole(self.unfinished_log, num_attempts):
                    return f"its log is not that of a whole run (see {self.unfinished_log})"
            self.unfinished_log.rename(self.log)
            return "done"
        finally:
            shutil.rmtree(self.saved, ignore_errors=True)


def is_whole(log: Path, num_attempts: int) -> bool:
    """Whether a log is there, and of one run alone that completed in so many attempts."""
    [run, *others] = read_runs(log) if log.exists() else [RunLog(log)]
    return not others and run.status == "completed" and len(run.runs) == num_attempts


def runs_of(group: Group, folder: Path) -> list[Run]:
    """Each run of a group, with its log in a folder."""

    def log_of(name: str) -> Path:
        return folder / f"{group.name} {name}.out".replace(",", "").replace(" ", "_")

    def sharded(ranks: int, more: str) -> list[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(ranks), "train_fsdp.py"]
        return [*launch, *group.flags.split(), *more.split()]

    runs = []
    for micro_batches, rows in group.references:
        shape = ["--batch-size", str(rows), "--grad-accumulation-steps", str(micro_batches)]
        command = [sys.executable, "train.py", *group.flags.split(), *shape]
        runs.append(Run(log_of(f"reference {micro_batches}x{rows}"), [command]))
    for name in group.ways:
        run = Run(log_of(f"fsdp {name}"), [sharded(*part) for part in WAYS[name]])
        for command in run.commands if len(run.commands) > 1 else ():
            command += ["--checkpoint-dir", os.path.relpath(run.saved, REPOSITORY), "--keep", "1"]
        runs.append(run)
    return runs


def log_environment() -> dict[str, str]:
    """One thread per rank, so that the order of sums inside an operation is the same everywhere.

    On GPUs the host only updates what is offloaded, each weight by itself: there more are of use.
    """
    return {"OMP_NUM_THREADS": "1"} | os.environ


def run_all(runs: Sequence[Run], *, num_jobs: int, deadline: float) -> None:
    """Run them, several at once, and none from the deadline (of the monotonic clock) on.

    A run that fails leaves the others alone. SIGTERM, Ctrl-C and, unless nohup has it ignored, the
    end of the terminal end all that run, and us.
    """
    signals: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: object) -> None:
        signals.append(number)
        if len(signals) == 1:  # asked again, torchrun would leave its ranks behind
            for process in started:
                process.terminate()

    def call(words: list[str]) -> int:
        # In a session of its own: Ctrl-C on the terminal reaches it once, through us.
        process = subprocess.Popen(tied(words), cwd=REPOSITORY, stdout=subprocess.DEVNULL,
                                   env=log_environment(), start_new_session=True)  # fmt: skip
        started.append(process)
        if signals:  # the last of them may have come before it was in the list
            process.terminate()
        return process.wait()

    def make(run: Run) -> None:
        begin = time.monotonic()
        if signals or begin >= deadline:
            return
        how = run.make(call)
        if not signals:
            print(f"{run.log.name}: {how}, {time.monotonic() - begin:.0f} s", file=sys.stderr)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, stop)
    with ThreadPoolExecutor(num_jobs) as threads:
        list(threads.map(make, runs))
    if signals:
        sys.exit(128 + signals[0])


def main(config: SeriesConfig) -> int:
    """Make the missing runs, print the table."""
    name = "cpu" if config.where == "cpu" else "gpu"
    folder = config.logs_dir or REPOSITORY / "logs" / "parity" / name
    groups = (runs_of(group, folder) for group in SERIES[config.where])
    # One of each group in turn, so that not all that run at once are of the largest model.
    runs = [run for turn in itertools.zip_longest(*groups) for run in turn if run is not None]
    try:
        lock_folder(folder)
        missing = [run for run in runs if not run.is_complete]
    except ValueError as error:
        refuse(error)
    deadline = time.monotonic() + 60 * config.max_minutes
    run_all(missing, num_jobs=config.jobs, deadline=deadline)
    comparisons = parity_comparisons(folder)
    print(parity_table(comparisons))
    if missing := [run.log.name for run in runs if not run.is_complete]:
        print(f"run again to go on; missing: {', '.join(missing)}", file=sys.stderr)
    equal = all(found.verdict == "equal" for _, found in comparisons)
    return 0 if equal and not missing else 1


if __name__ == "__main__":
    sys.exit(main(parse_flags(SeriesConfig)))
