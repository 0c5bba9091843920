"""Is this node fit for the job? Said in seconds, before anything is loaded.

    python preflight.py NUM_GPUS [SCRIPT [FLAGS...]]

Prints one line on this node, the state of its GPUs, and what the script would train (its
``--dry-run``, with the memory it needs). Exit status 2 and one line when the node or a flag will
not do. NUM_GPUS 0: the run is meant for CPUs. Run by ``sbatch_files/node.sh``.
"""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

PACKAGES = "torch numpy pyarrow tokenizers tiktoken mistral-common tqdm tyro".split()
GIB = 2**30
MIN_DISK_GIB = 1.0
GPU_STATE = "index,name,memory.used,memory.total,clocks.sm,power.draw,temperature.gpu"


def main(num_gpus: int, command: list[str]) -> None:
    """Check this node, then let the script check its flags and print its plan."""
    node = platform.node()
    try:
        installed = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        refuse(f"{error.name} is not installed in {sys.prefix} on {node}")
    import torch  # late: a missing package is said in one line

    seen = torch.cuda.device_count()
    disk_gib = shutil.disk_usage(".").free / GIB
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    print(
        f"{node}: Python {platform.python_version()}, {installed}; {seen} GPUs seen, {num_gpus} "
        f"asked; host memory {host_gib:.0f} GiB, disk {disk_gib:.0f} GiB free",
        flush=True,
    )
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", f"--query-gpu={GPU_STATE}", "--format=csv"], check=False)
    if seen < num_gpus:
        refuse(f"torch {torch.__version__} sees {seen} GPUs on {node}, {num_gpus} asked")
    if disk_gib < MIN_DISK_GIB:
        refuse(f"{disk_gib:.2f} GiB are free on the disk of this folder on {node}")
    if command:  # in this process: importing torch once more would take longer than the rest
        sys.argv = [*command, "--dry-run"]
        runpy.run_path(command[0], run_name="__main__")


def refuse(message: str) -> NoReturn:
    """Print one line and exit with status 2 (`cli.refuse` needs a package that may be missing)."""
    print(f"preflight.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    first, *rest = sys.argv[1:] or [""]
    if first == "--help":
        print(__doc__)
    elif rest and not os.path.isfile(rest[0]):
        refuse(f"{rest[0]} is no script (see --help)")
    elif first.isdecimal():
        main(int(first), rest)
    else:
        refuse(f"NUM_GPUS must be a whole number, not '{first}' (see --help)")
