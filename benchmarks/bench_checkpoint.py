"""What does a checkpoint cost on this GPU: time added to a step, time to disk, time to resume?

    python benchmarks/bench_checkpoint.py --output-dir logs/published/h200/checkpoint

Three runs of train.py with its defaults, each with a log of its own: one without checkpoints, one
that saves in its middle, and one that goes on from there. Prints a table, whose numbers are all
from the logs. The checkpoints are removed at the end.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import parse_flags
from figures import checkpoint_table
from make_logs import run_script

NUM_STEPS = 100  # long enough to go on while the save is written
SAVE_AT = 60  # also a save at the end, which the last run resumes from


@dataclass(frozen=True)
class BenchConfig:
    """Measure what a checkpoint costs on this GPU."""

    output_dir: Path = Path("logs/bench_checkpoint")
    """Folder of the logs."""
    checkpoint_dir: Path = Path("logs/bench_checkpoint/saved")
    """Folder of the checkpoints, on the disk that is to be measured."""
    flags: str = "--scaling-strategy all --scaling-factor 8"
    """Flags of train.py that say what to train."""


def run(config: BenchConfig, name: str, more: str) -> None:
    """Train once, with the log in the output folder."""
    log = config.output_dir / f"{name}.out"
    log.unlink(missing_ok=True)
    flags = f"{config.flags} {more} --logging-frequency 1 --no-digest"
    run_script(["train.py", *flags.split()], log, check=True)


def main(config: BenchConfig) -> None:
    """Make the three runs and print the table."""
    config.output_dir.mkdir(parents=True, exist_ok=True)
    saved = config.checkpoint_dir.resolve()
    shutil.rmtree(saved, ignore_errors=True)
    run(config, "without", f"--training-steps {NUM_STEPS}")
    saving = f"--checkpoint-dir {saved} --checkpoint-every {SAVE_AT} --keep 1"
    run(config, "saving", f"--training-steps {NUM_STEPS} {saving}")
    resume = f"--resume {saved}/step-{NUM_STEPS:08d}"
    run(config, "resumed", f"--training-steps {NUM_STEPS + 1} {resume}")
    shutil.rmtree(saved)
    print(checkpoint_table(config.output_dir))


if __name__ == "__main__":
    main(parse_flags(BenchConfig))
