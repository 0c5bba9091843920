"""What is this process running on: dtypes, seeds, device, versions, commit."""

import ctypes
import mmap
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.cuda.nccl import version as nccl_version

DtypeName = Literal["bf16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
GIB = 2**30
# Where the wait of a user for the first step begins to be ours.
TORCH_IMPORTED_AT = time.perf_counter()


def seed_everything(seed: int) -> None:
    """Seed every generator that a library may draw from; ours are seeded apart."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of every generator that `seed_everything` seeds, as JSON can hold it."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": numpy_state["state"] | {"key": key}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": on_device.numpy().tobytes().hex(),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave (on another kind of device, all but the GPU's)."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor_of_hex(state["torch"]))
    if device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(_tensor_of_hex(state["cuda"]), device)


def _tensor_of_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def make_deterministic() -> None:
    """Ask for kernels that give the same bits on every run; raises where there is none."""
    # cuBLAS reads this at its first call; the value is the one its documentation names.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def configure_allocators() -> None:
    """Set PyTorch's GPU and host allocators up, unless the user did.

    On the GPU segments grow (few fragments); eight threads at once page-lock memory of the host.
    Must come before the first allocation. The variable's older name works for all versions. NCCL
    takes a segment for one allocation when it registers the buffers of a captured graph, and hangs
    (pytorch/pytorch#158029): it must not.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        host = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:True,{host}"
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def keep_from_forks(tensors: Iterable[Tensor]) -> None:
    """Leave these tensors' memory of the host out of processes that are forked from now on.

    A fork copies page-locked memory at once (Linux, copy_present_page): gigabytes of it take
    seconds, and the memory twice. The tensors must live as long as the process.
    """
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    for tensor in tensors:
        first, end = -(-tensor.data_ptr() // page), (tensor.data_ptr() + tensor.nbytes) // page
        if first < end:
            size = ctypes.c_size_t((end - first) * page)
            libc.madvise(ctypes.c_void_p(first * page), size, mmap.MADV_DONTFORK)


def device_name(device: torch.device) -> str:
    """Name that the driver (GPU) or the system (CPU) reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory_gib(device: torch.device) -> float | None:
    """Memory of the GPU as the driver reports it; None for a CPU."""
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory / GIB if on_gpu else None


def peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Peak allocated and reserved by PyTorch's allocator; on CPU twice the peak resident size."""
    if device.type == "cuda":
        stats = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return stats[0] / GIB, stats[1] / GIB
    resident_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # KiB on Linux
    return resident_gib, resident_gib


def compilations() -> tuple[float, int]:
    """Seconds that this process spent compiling, and the number of graphs that it compiled."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return 0.0, 0
    from torch._dynamo.utils import compile_times, counters

    names, seconds = compile_times(repr="csv")
    spent = dict(zip(names, seconds, strict=True)).get("_compile.compile_inner", "0")
    return sum(map(float, str(spent).split(","))), counters["stats"]["unique_graphs"]


def versions() -> dict[str, str | None]:
    """Versions that can change a number."""
    nccl = None
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in nccl_version())
    own = {"python": platform.python_version(), "torch": torch.__version__}
    return {**own, "cuda": torch.version.cuda, "nccl": nccl}


def nccl_environment() -> dict[str, str]:
    """What the environment asks of NCCL: it can decide how fast a collective is."""
    return {k: relative_path(v) if Path(v).is_absolute() else v
            for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}  # fmt: skip


def source_version() -> dict[str, Any]:
    """Commit of this code and whether the tree differs from it.

    From ``FSDP_COMMIT`` where that is set (the code travelled without its history), else from git.
    """
    if commit := os.environ.get("FSDP_COMMIT"):
        return {"commit": commit, "dirty": None}
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(here, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": "unknown", "dirty": None}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def warn(message: str) -> None:
    """Say something on standard error, once per job."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)


def relative_path(path: str | Path) -> str:
    """Path as seen from the repository, else its name alone: logs tell no machine's folders."""
    here, full = Path(__file__).resolve().parent, Path(path).resolve()
    return str(full.relative_to(here)) if full.is_relative_to(here) else full.name
