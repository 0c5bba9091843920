"""How many tokens per second does the data pipeline deliver, and how soon?

Run `make bench-data` (or `python benchmarks/bench_data.py --help`). Each measurement is a process
of its own, so that the first batch counts loading the tokenizer and opening the dataset, but not
importing torch. Prints the median and the range over the repeats.
"""

import os
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from cli import parse_flags  # noqa: E402


@dataclass(frozen=True)
class BenchConfig:
    """Measure the data pipeline."""

    dataset: str = str(REPOSITORY / "data" / "sample.parquet")
    """Parquet file, folder of them, or glob, with a column `text`."""
    tokenizer: str = "tekken"
    """`tekken`, a tokenizer.json or its folder, or a hub id."""
    sequence_length: int = 4096
    """Tokens per row."""
    rows: int = 8
    """Rows a step."""
    steps: int = 200
    """Steps measured after the first."""
    workers: tuple[int, ...] = (0, 2)
    """Numbers of loader workers, each measured."""
    repeats: int = 3
    """Measurements of each."""


def measure(config: BenchConfig, num_workers: int) -> dict[str, float]:
    """First batch (s), then tokens per second over `config.steps` more."""
    from dataset import build_loader, load_tokenizer, open_corpus

    start_s = time.perf_counter()
    corpus, tokenizer = open_corpus(config.dataset), load_tokenizer(config.tokenizer)
    loader = build_loader(
        corpus, tokenizer, sequence_length=config.sequence_length, rows=range(config.rows),
        global_rows=config.rows, seed=0, num_workers=num_workers,
    )  # fmt: skip
    next(loader)
    first_batch_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    num_tokens = sum(next(loader).labels_RT.numel() for _ in range(config.steps))
    tokens_per_s = num_tokens / (time.perf_counter() - start_s)
    loader.close()
    return {"first_batch_s": first_batch_s, "tokens_per_s": tokens_per_s}


def measure_in_a_process(config: BenchConfig, num_workers: int) -> dict[str, float]:
    """The same, in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, config, num_workers).result()


def main(config: BenchConfig) -> None:
    """Measure each number of workers and print the table."""
    num_cores = len(os.sched_getaffinity(0))
    print(
        f"{Path(config.dataset).name}, {config.tokenizer}, {config.rows} rows of "
        f"{config.sequence_length} tokens a step, 1 + {config.steps} steps, "
        f"{config.repeats} repeats, {num_cores} cores, Python {platform.python_version()}"
    )
    for num_workers in config.workers:
        runs = [measure_in_a_process(config, num_workers) for _ in range(config.repeats)]
        for key in ("tokens_per_s", "first_batch_s"):
            values = sorted(run[key] for run in runs)
            shown = (statistics.median(values), values[0], values[-1])
            middle, low, high = (f"{value:,.2f}" for value in shown)
            print(f"{num_workers} workers: {key:<14} {middle:>14}  ({low} to {high})")


if __name__ == "__main__":
    main(parse_flags(BenchConfig))
