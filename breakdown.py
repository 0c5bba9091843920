"""Where does the time of a step go? Shares of a profile, from what ran when.

A profile is a list of intervals (name, start, end) of kernels, or of operators on a CPU. Each
moment counts once: for the first kind in KINDS of which something runs, so that communication
counts only where no computation hides it. What a kernel does is told from its name.
"""

import collections
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Kind -> what its kernels' names hold. The first that fits is taken; what fits none is elementwise.
_NAMES = {
    "attention": r"cudnn|fmha|flash|scaled_dot_product|attention",
    "communication": r"nccl|gloo|c10d",
    # Of the compiled kernels only the update of AdamW interpolates.
    "optimizer": r"multi_tensor_apply|adam|_foreach_|lpnorm|_lerp_",
    "loss": r"logsumexp|log_softmax|nll_loss|cross_entropy",
    "matmuls": r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitkreduce|aten::(add|b|add?bmm)?mm$",
    # Compiled kernels name all that they fuse, and a copy is then the least of it.
    "copies": r"^(?!triton).*(memcpy|memset|copy|chunk_cat|catarray)",
}
_PATTERNS = {kind: re.compile(names, re.IGNORECASE) for kind, names in _NAMES.items()}
ELEMENTWISE, IDLE = "norm and elementwise", "idle"
# From what hides to what is hidden.
KINDS: tuple[str, ...] = ("attention", "loss", "matmuls", "optimizer", ELEMENTWISE, "communication",
                          "copies", IDLE)  # fmt: skip

NUM_LARGEST, NAME_CHARS = 20, 250


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that ran from ``start_us`` to ``end_us`` on the clock of the profile."""

    name: str
    start_us: float
    end_us: float


def kind_of(name: str) -> str:
    """The kind of a kernel (or CPU operator) of this name, one of KINDS."""
    return next((kind for kind, names in _PATTERNS.items() if names.search(name)), ELEMENTWISE)


def seconds_by_kind(intervals: Iterable[Interval], wall_s: float) -> dict[str, float]:
    """Seconds of each kind; with ``idle``, in which nothing ran, they sum to ``wall_s``.

    Where the intervals last longer than the wall time, nothing is idle.
    """
    changes: list[tuple[float, str, int]] = []
    for interval in intervals:
        kind = kind_of(interval.name)
        changes += [(interval.start_us, kind, 1), (interval.end_us, kind, -1)]
    changes.sort()
    seconds, running = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    last_us = changes[0][0] if changes else 0.0
    for now_us, kind, change in changes:
        if now_us > last_us:
            seconds[next((k for k in KINDS if running[k]), IDLE)] += (now_us - last_us) / 1e6
        running[kind] += change
        last_us = now_us
    seconds[IDLE] = max(0.0, wall_s - sum(seconds[kind] for kind in KINDS if kind != IDLE))
    return seconds


def largest_kernels(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds of the NUM_LARGEST kernels that ran longest, so that a reader can tell their kinds.

    Names are cut to NAME_CHARS; what ran at the same time counts for each.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    for interval in intervals:
        seconds[interval.name[:NAME_CHARS]] += (interval.end_us - interval.start_us) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:NUM_LARGEST])


def check_record(record: Mapping) -> None:
    """Raise KeyError or TypeError for a record that lacks a number, or has a strange one."""
    numbers = [record[f"{name}_step"] for name in ("first", "wall_s_per", "num_kernels_per")]
    numbers += [record["num_steps"], *(record["seconds_per_step"][kind] for kind in KINDS)]
    if min(numbers) < 0 or not record["wall_s_per_step"]:
        raise TypeError("a number of its Breakdown: record is below 0, or its time is 0")


def shares_of_step(record: Mapping, step_s: float | None) -> dict[str, float]:
    """Shares of a step (they sum to 1) from a ``Breakdown:`` record.

    The profiler slows the CPU that launches kernels, but not the kernels: given the seconds of a
    step that was not profiled, what its kernels leave of it is idle.
    """
    busy = {kind: record["seconds_per_step"][kind] for kind in KINDS if kind != IDLE}
    total = max(step_s or record["wall_s_per_step"], sum(busy.values()))
    shares = {kind: seconds / total for kind, seconds in busy.items()}
    return shares | {IDLE: 1.0 - sum(shares.values())}
