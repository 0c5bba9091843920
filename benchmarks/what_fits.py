"""What loads and what trains on this GPU, and on more of them: every proof run, one command.

    python benchmarks/what_fits.py

Searches on one device (`load` with and without a limit, `train` at each checkpointing mode, then
five steps of train.py at each answer), single runs that hold the memory model against measured
peaks, and searches on simulated world sizes: one real rank under FSDP whose collectives do nothing.
A log each in ``--output-dir``; what is complete is not repeated, so that an interrupted series goes
on. Ends with the figure and the tables.
"""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from cli import parse_flags, refuse  # noqa: E402
from figures import what_fits_tables  # noqa: E402
from fit_report import plot_what_fits, read_searches, simulated_bests  # noqa: E402
from run_log import read_run  # noqa: E402
from search import Search, SearchConfig  # noqa: E402

EARLIER_LIMIT_GIB = 91.7  # of the GH200 on which the earlier experiment found 19 and 24
STEPS = 5
# Single runs: strategy, factor, rows.
MEASURED = (("all", 8, 4), ("n_layers", 1, 1), ("all", 11, 1), ("all", 8, 1))
WORLD_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class WhatFitsConfig:
    """Run the fitting experiment on the device at hand."""

    output_dir: Path = Path("logs/what_fits")
    """Folder of the logs."""
    max_minutes: float = 60.0
    """Start nothing after this time; run again to go on."""
    only: str = ""
    """Run only what has this in its name: load, train, steps, measured, simulated, all_…"""
    high: int = 64
    """Largest scaling factor that is tried."""
    sequence_length: int = 4096
    """Tokens per row."""
    memory_limit_gib: float | None = None
    """Bound of all that has none of its own."""
    tokenizer_name_or_path: str = "tekken"
    """`tekken`, a tokenizer.json or its folder, or a hub id."""
    figure: Path = Path("plots/what_fits.png")
    """Where the figure is drawn."""


@dataclass(frozen=True)
class Job:
    """One log: a search, or five steps at the answer of another one."""

    name: str
    search: SearchConfig = field(default_factory=SearchConfig)
    world_size: int = 1
    answer_of: str = ""


def plan(config: WhatFitsConfig) -> list[Job]:
    """All jobs, in order: each is of use without those after it."""
    base = SearchConfig(
        high=config.high,
        sequence_length=config.sequence_length,
        tokenizer_name_or_path=config.tokenizer_name_or_path,
        memory_limit_gib=config.memory_limit_gib,
    )
    jobs = []
    for strategy in ("all", "n_layers"):
        one = replace(base, scaling_strategy=strategy)
        limited = replace(one, memory_limit_gib=EARLIER_LIMIT_GIB)
        jobs += [Job(f"load_{strategy}", one), Job(f"load_{strategy}_limited", limited)]
    for world_size in WORLD_SIZES:
        many = replace(base, mode="train", activation_checkpointing="full")
        jobs.append(Job(f"simulated_{world_size}", many, world_size))
    for strategy in ("all", "n_layers"):
        for mode in ("full", "selective", "none"):
            name = f"{strategy}_{mode}"
            one = replace(base, scaling_strategy=strategy, mode="train")
            one = replace(one, activation_checkpointing=mode)
            jobs.append(Job(f"train_{name}", one))
            jobs.append(Job(f"steps_{name}", one, answer_of=f"train_{name}"))
    for strategy, factor, rows in MEASURED:
        for compiled in (False, True):
            for mode in ("none", "selective", "full"):
                one = replace(base, scaling_strategy=strategy, low=factor, high=factor)
                one = replace(one, batch_size=rows, mode="train", compile=compiled)
                name = f"measured_{strategy}_{factor}_rows_{rows}_{mode}{'_compiled' * compiled}"
                jobs.append(Job(name, replace(one, activation_checkpointing=mode)))
    return [job for job in jobs if config.only in job.name]


def is_done(log: Path) -> bool:
    """Whether a log ended, and not in a failure."""
    return log.exists() and read_run(log).status in ("completed", "out_of_memory")


def run_job(job: Job, folder: Path) -> None:
    """Make one log, unless it is complete."""
    log = folder / f"{job.name}.out"
    if is_done(log):
        return
    log.unlink(missing_ok=True)
    started = time.monotonic()
    if job.world_size > 1 or job.search.low == job.search.high:  # no search: no script of its own
        with contextlib.redirect_stdout(sys.stderr):
            Search(replace(job.search, log_file=log), job.world_size).run()
    else:
        command = steps_command(job, folder) if job.answer_of else search_command(job.search)
        if command is None:
            return
        command += ["--log-file", os.path.relpath(log, REPOSITORY)]
        subprocess.run([sys.executable, *command], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    print(f"{job.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def search_command(search: SearchConfig) -> list[str]:
    """The script and its flags."""
    command = ["load_model_no_fsdp.py", "--compile" if search.compile else "--no-compile"]
    names = "scaling_strategy low high mode sequence_length batch_size activation_checkpointing"
    names += " tokenizer_name_or_path memory_limit_gib"
    for name in names.split():
        if getattr(search, name) is not None:
            command += ["--" + name.replace("_", "-"), str(getattr(search, name))]
    return command


def steps_command(job: Job, folder: Path) -> list[str] | None:
    """Five steps of train.py at the answer of a search; None where nothing fits."""
    log = folder / f"{job.answer_of}.out"
    best = (read_run(log).end or {}).get("best_factor") if log.exists() else None
    if best is None:
        return None
    command = ["train.py", "--training-steps", str(STEPS), "--logging-frequency", "1"]
    command += ["--no-digest", "--scaling-factor", str(best)]
    names = "scaling_strategy sequence_length activation_checkpointing tokenizer_name_or_path"
    for name in names.split():
        command += ["--" + name.replace("_", "-"), str(getattr(job.search, name))]
    return command


def main(config: WhatFitsConfig) -> None:
    """Run all that time allows; draw the figure, write and print the tables."""
    started, folder = time.monotonic(), config.output_dir
    for job in plan(config):
        if time.monotonic() - started < 60 * config.max_minutes:
            try:
                run_job(job, folder)
            except ValueError as error:  # the device is not free, or the inputs are unusable
                refuse(error)
    if not folder.exists() or not read_searches(folder):
        refuse(f"no search was run: {folder} holds none")
    if simulated_bests(folder):
        plot_what_fits(folder, config.figure)
    tables = what_fits_tables(folder)
    (folder / "what_fits.md").write_text(tables + "\n")
    print(tables)


if __name__ == "__main__":
    matplotlib.use("agg")
    main(parse_flags(WhatFitsConfig))
