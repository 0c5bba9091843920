"""How many tokens per second does the data pipeline deliver, and how soon?

Run `make bench-data` (or `python benchmarks/bench_data.py --help`). Each measurement is a process
of its own, so that the first batch counts loading the tokenizer and opening the dataset, but not
importing torch. Prints the median and the range over the repeats, and last of all one line of JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
METHOD_VERSION = 1
sys.path.insert(0, str(REPOSITORY))


def measure(options: argparse.Namespace, num_workers: int) -> dict[str, float]:
    """First batch (s), then tokens per second over `options.steps` more."""
    from dataset import build_loader, load_tokenizer, open_corpus

    start_s = time.perf_counter()
    loader = build_loader(
        open_corpus(options.dataset),
        load_tokenizer(options.tokenizer),
        sequence_length=options.sequence_length,
        rows=range(options.rows),
        global_rows=options.rows,
        seed=0,
        num_workers=num_workers,
    )
    next(loader)
    first_batch_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    num_tokens = sum(next(loader).labels_RT.numel() for _ in range(options.steps))
    tokens_per_s = num_tokens / (time.perf_counter() - start_s)
    loader.close()
    return {"first_batch_s": first_batch_s, "tokens_per_s": tokens_per_s}


def measure_in_a_process(num_workers: int) -> dict[str, float]:
    """The same, in a fresh process with this one's flags."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(num_workers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_options() -> argparse.Namespace:
    """Flags of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default=str(REPOSITORY / "data" / "sample.parquet"))
    parser.add_argument("--tokenizer", default="tekken")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8, help="rows a step")
    parser.add_argument("--steps", type=int, default=200, help="steps measured after the first")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure each number of workers and print the table and the JSON."""
    options = read_options()
    if options.measure is not None:
        print(json.dumps(measure(options, options.measure)))
        return
    num_cores = len(os.sched_getaffinity(0))
    print(
        f"{Path(options.dataset).name}, {options.tokenizer}, {options.rows} rows of "
        f"{options.sequence_length} tokens a step, 1 + {options.steps} steps, "
        f"{options.repeats} repeats, {num_cores} cores, Python {platform.python_version()}"
    )
    results = []
    for num_workers in options.workers:
        runs = [measure_in_a_process(num_workers) for _ in range(options.repeats)]
        result: dict[str, float | list[float]] = {"num_workers": num_workers}
        for key in ("tokens_per_s", "first_batch_s"):
            values = sorted(run[key] for run in runs)
            result |= {key: statistics.median(values), f"{key}_range": [values[0], values[-1]]}
            middle, low, high = (f"{v:,.2f}" for v in (result[key], values[0], values[-1]))
            print(f"{num_workers} workers: {key:<14} {middle:>14}  ({low} to {high})")
        results.append(result)
    flags = {key: getattr(options, key) for key in ("tokenizer", "sequence_length", "rows")}
    flags |= {"steps": options.steps, "repeats": options.repeats, "num_cores": num_cores}
    print(json.dumps({"method_version": METHOD_VERSION, **flags, "results": results}))


if __name__ == "__main__":
    main()
