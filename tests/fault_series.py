"""Would the certificate fail where training is wrong?

    python tests/fault_series.py FOLDER [bf16]

References without FSDP, one FSDP run that is right, and one with each planted fault: a log each,
all judged by parity.compare. Prints the table.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from parity_series import REFERENCES, log_environment  # noqa: E402

from parity import TABLE_HEAD, Comparison, compare, format_row  # noqa: E402
from run_log import read_run  # noqa: E402

# One padded document per row: ranks have different numbers of training tokens.
FLAGS = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --training-steps 12 "
    "--learning-rate 3e-4 --lr-warmup-steps 4 --logging-frequency 1 "
    "--num-workers 0 --no-packing --dataset tests/data/ragged.parquet"
).split()
FAULTS = ("none", "same_rows", "mean_of_means", "local_clipping", "scaled_gradient")
FAULTS += ("unreduced_layer", "another_seed")


def flags_of(dtype: str) -> list[str]:
    """Flags of every run of a series."""
    return [*FLAGS, "--model-dtype", dtype, "--compute-dtype", dtype]


def command_of(fault: str, dtype: str) -> list[str]:
    """The real launcher on the script with a fault planted (``none``: with none)."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", str(HERE / "faulty_train.py"), fault, "train_fsdp.py"]
    more = ["--batch-size", "4"]
    if fault == "another_seed":
        more += ["--set-seed", "43"]
    if fault == "unreduced_layer":
        more += ["--no-fused-optimizer"]  # the fused one takes no mix of sharded and whole weights
    return [*launch, *flags_of(dtype), *more]


def run(command: list[str], log: Path) -> None:
    """Run a command to its end, its log in a file."""
    done = subprocess.run(
        [*command, "--log-file", str(log)],
        cwd=HERE.parent,
        env=log_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def make_series(folder: Path, dtype: str = "fp32") -> dict[str, Comparison]:
    """Comparison of each fault's run with the references, by the name of the fault."""
    folder.mkdir(parents=True, exist_ok=True)
    references = []
    for micro_batches, rows in REFERENCES:
        log = folder / f"reference_{micro_batches}x{rows}.out"
        shape = ["--batch-size", str(rows), "--grad-accumulation-steps", str(micro_batches)]
        run([sys.executable, "train.py", *flags_of(dtype), *shape], log)
        references.append(read_run(log))
    found = {}
    for fault in FAULTS:
        log = folder / f"fault_{fault}.out"
        run(command_of(fault, dtype), log)
        found[fault] = compare([read_run(log)], references)
    return found


if __name__ == "__main__":
    print(TABLE_HEAD)
    for name, comparison in make_series(Path(sys.argv[1]), *sys.argv[2:]).items():
        print(format_row(name, comparison))
