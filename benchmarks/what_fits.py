"""What loads and what trains on this GPU, and on more of them: every proof run, one command.

    python benchmarks/what_fits.py

Searches on one device (`load` with and without a limit, `train` at each checkpointing mode, then
five steps of train.py at each answer), single runs that hold the memory model against measured
peaks, and searches on simulated world sizes: one real rank under FSDP whose collectives do nothing.
A log each in ``--output-dir``; what is complete is not repeated, so that an interrupted series goes
on. Ends with the figure and the tables.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import parse_flags, refuse
from figures import what_fits_tables
from fit_report import plot_what_fits, read_searches, simulated_rows
from make_logs import flags_of, make_logs, run_script
from run_log import read_run
from search import Search, SearchConfig

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


def plan(config: WhatFitsConfig) -> dict[str, Callable[[Path], str]]:
    """What makes each log, by name, in order: each is of use without those after it."""
    base = SearchConfig(
        high=config.high, sequence_length=config.sequence_length,
        tokenizer_name_or_path=config.tokenizer_name_or_path,
        memory_limit_gib=config.memory_limit_gib,
    )  # fmt: skip
    makers: dict[str, Callable[[Path], str]] = {}
    for strategy in ("all", "n_layers"):
        one = replace(base, scaling_strategy=strategy)
        makers[f"load_{strategy}"] = partial(search_alone, one)
        limited = replace(one, memory_limit_gib=EARLIER_LIMIT_GIB)
        makers[f"load_{strategy}_limited"] = partial(search_alone, limited)
    base = replace(base, mode="train")
    for world_size in WORLD_SIZES:
        many = replace(base, activation_checkpointing="full")
        makers[f"simulated_{world_size}"] = partial(search_here, many, world_size)
    for strategy, mode in product(("all", "n_layers"), ("full", "selective", "none")):
        one = replace(base, scaling_strategy=strategy, activation_checkpointing=mode)
        makers[f"train_{strategy}_{mode}"] = partial(search_alone, one)
        answer = config.output_dir / f"train_{strategy}_{mode}.out"
        makers[f"steps_{strategy}_{mode}"] = partial(train_at_answer, one, answer)
    for compiled, (strategy, factor, rows) in product((False, True), MEASURED):
        for mode in ("none", "selective", "full"):
            one = replace(base, scaling_strategy=strategy, low=factor, high=factor, batch_size=rows,
                          compile=compiled, activation_checkpointing=mode)  # fmt: skip
            name = f"measured_{strategy}_{factor}_rows_{rows}_{mode}{'_compiled' * compiled}"
            makers[name] = partial(search_here, one, 1)
    return {name: make for name, make in makers.items() if config.only in name}


def search_here(search: SearchConfig, world_size: int, log: Path) -> str:
    """A search that has no script of its own: of one size, or on simulated ranks."""
    with contextlib.redirect_stdout(sys.stderr):
        return Search(replace(search, log_file=log), world_size).run()


def search_alone(search: SearchConfig, log: Path) -> str:
    """A search by its script."""
    names = "scaling_strategy low high mode sequence_length batch_size activation_checkpointing"
    flags = flags_of(search, f"{names} tokenizer_name_or_path memory_limit_gib")
    compiled = "--compile" if search.compile else "--no-compile"
    return run_script(["load_model_no_fsdp.py", compiled, *flags], log)


def train_at_answer(search: SearchConfig, answer: Path, log: Path) -> str:
    """Five steps of train.py at the answer of a search."""
    best = (read_run(answer).end or {}).get("best_factor") if answer.exists() else None
    if best is None:
        return f"{answer.name} has no answer"
    names = "scaling_strategy sequence_length activation_checkpointing tokenizer_name_or_path"
    words = f"train.py --training-steps {STEPS} --logging-frequency 1 --no-digest --scaling-factor"
    return run_script([*words.split(), str(best), *flags_of(search, names)], log)


def main(config: WhatFitsConfig) -> None:
    """Run all that time allows; draw the figure, write and print the tables."""
    folder = config.output_dir
    try:
        make_logs(plan(config), folder, max_minutes=config.max_minutes)
        if not read_searches(folder):
            refuse(f"no search was run: {folder} holds none")
        if simulated_rows(folder):
            plot_what_fits(folder, config.figure)
        tables = what_fits_tables(folder)
    except ValueError as error:  # the device is not free, or the inputs or a log are unusable
        refuse(error)
    (folder / "what_fits.md").write_text(tables + "\n")
    print(tables)


if __name__ == "__main__":
    matplotlib.use("agg")
    main(parse_flags(WhatFitsConfig))
