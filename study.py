"""Which runs of a scaling study may share a line, and what are the points on it?

Runs that differ in any setting but their size are on lines of their own, whose variant names what
tells them apart; repeats of one configuration are pooled and counted.
"""

import collections
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis import NUM_BYTES, SKIP_STEPS, pool, table
from hardware import exchanges_gradients
from run_log import RunLog

OUT_OF_MEMORY = "out_of_memory"
AS_LABELLED = "as labelled"
# What is no line's own, or makes its colour; all other settings of a run split lines.
COLOR_FIELDS = ("fsdp", "gpus", "nodes")
LINE_FIELDS = ("strategy", "batch_size", "grad_accumulation_steps", "sequence_length",
               "model_dtype", "compute_dtype", "activation_checkpointing", "compiled", "launched",
               "replicas", "device", "peak_tflops", "torch_version")  # fmt: skip
WORDS = {
    "strategy": "strategy {}", "batch_size": "batch {}", "sequence_length": "sequence {}",
    "grad_accumulation_steps": "micro-batches {}", "model_dtype": "{} weights", "device": "{}",
    "compute_dtype": "{} compute", "activation_checkpointing": "checkpointing {}",
    "replicas": "replicas {}", "peak_tflops": "peak {:g} TFLOP/s",
    "torch_version": "torch {}", "launched": "{}",
}  # fmt: skip
KEPT = "`--no-reshard-after-forward`"
DEFAULTS = {"reshard_after_forward": True, "cpu_offload": False, "activation_checkpointing": "none"}
FLAG_WORDS = {"reshard_after_forward": ("no reshard", "reshard"),
              "cpu_offload": ("no CPU offload", "CPU offload")}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Runs that one line joins: a row per size in ``points``."""

    configuration: str  # GPUs, FSDP or not
    strategy: str  # each has a panel of its own
    variant: str  # all else that tells it apart
    hue: int  # number of the configuration
    shape: int  # number of the variant
    points: pd.DataFrame

    @property
    def has_own_batches(self) -> bool:
        """Whether the batch is another at each size, so that a point must say it."""
        return AS_LABELLED in self.variant or self.points["batch_size"].nunique() > 1


def ways_of(row: Any) -> str:
    """How a run of the table was launched and sharded otherwise than by default, in words."""
    flags = json.loads(row.other_flags)
    num_bytes = (NUM_BYTES.get(row.model_dtype, 0), NUM_BYTES.get(row.compute_dtype, 0))
    exchanges = row.fsdp and exchanges_gradients(
        row.gpus // row.replicas, replicas=row.replicas, nodes=row.nodes, num_bytes=num_bytes
    )
    words = {"gradients reduced in fp32": exchanges and not flags.get("gradients_exchanged"),
             KEPT: flags.get("reshard_after_forward") is False,
             "`--cpu-offload`": flags.get("cpu_offload") is True,
             f"`--replicas {row.replicas}`": row.replicas > 1}  # fmt: skip
    return ", ".join(filter(None, [row.launched, *(flag for flag, on in words.items() if on)]))


def rows_of(frame: Any) -> list[Any]:
    """Rows, with the columns as attributes."""
    return list(frame.itertuples())


def drawn_points(frame: pd.DataFrame, mfu: str) -> tuple[pd.DataFrame, list[str]]:
    """Pooled runs with value, ``_low`` and ``_high`` of each figure; and what is not drawn, why."""
    frame = frame.assign(profiled=[bool(json.loads(f).get("profile")) for f in frame.other_flags])
    is_out = frame["status"] == OUT_OF_MEMORY
    empty = (frame["num_steps"] == 0) & ~is_out & ~frame["profiled"]
    left_out = [f"{log}: it was profiled, which is slower" for log in frame.log[frame.profiled]]
    for row in rows_of(frame[empty]):
        left_out.append(f"{row.log}: {row.status} without a logged step after the warm-up")
    cut_short = set(frame.log[~frame["status"].isin(["completed", OUT_OF_MEMORY])])
    frame = frame[~empty & ~frame["profiled"]].copy()
    # A run that ended before its first step cannot tell the peak from its own lines.
    same = [*COLOR_FIELDS, *(field for field in LINE_FIELDS if field != "peak_tflops")]
    siblings = frame.groupby(same, dropna=False)["peak_tflops"]
    frame["peak_tflops"] = frame["peak_tflops"].fillna(siblings.transform("first"))
    frame["status"] = frame["status"].where(frame["status"] == OUT_OF_MEMORY, "trained")
    points = pool(frame)
    points["cut_short"] = [bool(cut_short.intersection(log.split(", "))) for log in points["log"]]
    logged = "_as_logged" * (mfu == "as-logged")
    single = points["n"] == 1
    ends = {
        "": points["tokens_per_s_median"],
        "_low": points["tokens_per_s_p25"].clip(upper=points["tokens_per_s_min"].mask(single)),
        "_high": points["tokens_per_s_p75"].clip(lower=points["tokens_per_s_max"].mask(single)),
    }
    per_speed = {
        "tokens_per_sec": 1.0,
        "mfu": points[f"mfu_pct{logged}"] / points["tokens_per_s"],
        "tflops": points[f"tflops{logged}"] / points["tokens_per_s"],
        "scaling_efficiency": 100 / _baselines(points),
    }
    columns = {f"{k}{end}": v * f for end, v in ends.items() for k, f in per_speed.items()}
    for end, share in {"": "median", "_low": "p25", "_high": "p75"}.items():
        columns[f"training_tokens_pct{end}"] = points[f"training_tokens_pct_{share}"]
        columns[f"peak_memory{end}"] = points["peak_gib"]
    columns["peak_memory_high"] = points["peak_reserved_gib"].fillna(points["peak_gib"])
    return points.assign(**columns), left_out


def settings_of(row: Any) -> dict[str, Any]:
    """What splits lines, of a row of the table; None: not logged."""
    flags = json.loads(row.other_flags)
    flags.pop("profile", None)
    fields = {field: getattr(row, field) for field in LINE_FIELDS}
    return {k: None if v != v else v for k, v in {**fields, **flags}.items()}


def _baselines(points: pd.DataFrame) -> pd.Series:
    """Tokens/s of one GPU without FSDP at each row's size and settings; NaN where none was run."""
    rows = rows_of(points)
    speeds = [bases[0].tokens_per_s_median if len(bases) == 1 else np.nan
              for bases in bases_of(rows, rows)]  # fmt: skip
    return pd.Series(speeds, points.index, dtype=float)


def bases_of(rows: Sequence[Any], candidates: Sequence[Any]) -> list[list[Any]]:
    """For each row the candidates on one GPU without FSDP of its size and settings, batch included.

    Where some of them were launched by default, those alone.
    """
    alone = [(row, settings_of(row)) for row in candidates
             if not row.fsdp and row.gpus == 1 and row.status == "trained"]  # fmt: skip
    found = []
    for row in rows:
        own, size = settings_of(row), row.num_parameters
        same = [base for base, other in alone
                if base.num_parameters == size and same_settings(own, other)]  # fmt: skip
        found.append([base for base in same if not base.launched] or same)
    return found


def same_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether what both have is the same, as far as it was logged.

    Replicas are FSDP's alone, and how kernels are launched is a means.
    """
    names = one.keys() & other.keys() - {"replicas", "launched"}
    return all(one[n] == other[n] or None in (one[n], other[n]) for n in names)


def split_lines(points: pd.DataFrame) -> list[Line]:
    """A line for each way of running, ordered by configuration."""
    rows = sorted(rows_of(points), key=lambda row: (row.fsdp, row.gpus, row.strategy))
    names = [configuration_of(row) for row in rows]
    own = [settings_of(row) for row in rows]
    _leave_defaults(names, own)
    _join_batches(rows, names, own)
    telling = [field for field in telling_settings(own, names) if field != "strategy"]
    telling += [flag for flag, value in DEFAULTS.items() if flag not in telling
                and any(fields.get(flag) not in (None, value) for fields in own)]  # fmt: skip
    variants = [variant_of(fields, telling) for fields in own]
    hues, shapes = list(dict.fromkeys(names)), list(dict.fromkeys(variants))
    ordered = points.loc[[row.Index for row in rows]].assign(name=names, variant=variants)
    return [
        Line(name, strategy, variant, hues.index(name), shapes.index(variant),
             own_points.sort_values(["num_parameters", "batch_size"]))
        for (name, strategy, variant), own_points
        in ordered.groupby(["name", "strategy", "variant"], sort=False)
    ]  # fmt: skip


def _leave_defaults(names: Sequence[str], own: Sequence[dict[str, Any]]) -> None:
    """Take from the settings what is done by default, where all of a configuration tell it."""
    for name, (flag, value) in itertools.product(set(names), DEFAULTS.items()):
        those = [fields for fields, other in zip(own, names, strict=True) if other == name]
        if all(fields.get(flag) is not None for fields in those):
            for fields in (fields for fields in those if fields[flag] == value):
                del fields[flag]


def _join_batches(rows: Sequence[Any], names: Sequence[str], own: Sequence[dict[str, Any]]) -> None:
    """Name alike the batches that are the largest where they were trained at, if several.

    Not of a batch that at more sizes is not: it has a line of its own.
    Decided among the runs of one configuration that differ in size and batch alone; a batch that
    none of them trained at, and that is out of memory, is one of them.
    """
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for number, (name, fields) in enumerate(zip(names, own, strict=True)):
        groups[repr((name, fields | {"batch_size": None}))].append(number)
    for group in groups.values():
        trained = [r for r in (rows[n] for n in group) if r.tokens_per_s_median > 0]
        largest: dict[int, int] = {}
        for row in trained:
            size = row.num_parameters
            largest[size] = max(row.batch_size, largest.get(size, 1))
        tops, tried = collections.Counter(largest.values()), {row.batch_size for row in trained}
        sizes = collections.Counter(
            b for _, b in {(r.num_parameters, r.batch_size) for r in trained}
        )
        labelled = {batch for batch, top in tops.items() if batch > 1 and 2 * top >= sizes[batch]}
        for n in group if len(labelled) > 1 else ():
            row = rows[n]
            is_new = row.status == OUT_OF_MEMORY and row.batch_size not in tried | {1}
            is_top = row.batch_size == largest.get(row.num_parameters, row.batch_size)
            is_top |= row.status == OUT_OF_MEMORY
            if is_new or (row.batch_size in labelled and is_top):
                own[n]["batch_size"] = AS_LABELLED


def configuration_of(row: Any) -> str:
    """GPUs (or ranks on CPUs), nodes and FSDP of a row of the table, in words."""
    unit = ("CPU rank" if row.device_type == "cpu" else "GPU") + "s" * (row.gpus > 1)
    where = f" on {row.nodes:.0f} nodes" if row.nodes > 1 else ""
    return f"{row.gpus} {unit}{where}, {'FSDP' if row.fsdp else 'no FSDP'}"


def telling_settings(own: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Settings of which several values are known, or that one line of a colour lacks."""
    fields = dict.fromkeys(field for one in own for field in one)

    def values(field: str, name: str | None) -> set[str]:
        found = {repr(o.get(field)) for o, n in zip(own, names, strict=True) if name in (None, n)}
        # A peak that is not known is that of another device, which has a name.
        return found if name and field != "peak_tflops" else found - {"None"}

    return [f for f in fields if any(len(values(f, name)) > 1 for name in (None, *names))]


def variant_of(own: dict[str, Any], telling: Iterable[str]) -> str:
    """Some settings, in words."""
    words = []
    for field in (field for field in telling if field in own):
        value, name = own[field], field.replace("_", " ")
        if value is None:
            words.append(f"{name} not logged")
        elif isinstance(value, bool):
            words.append(FLAG_WORDS.get(field, (f"not {name}", name))[value])
        else:
            words.append(WORDS.get(field, f"{name} {{}}").format(value))
    return ", ".join(filter(None, words))


def profiled_runs(runs: Sequence[RunLog]) -> list[tuple[Any, RunLog]]:
    """(row of the table, run) of each run that was profiled, by size."""
    rows = [(row, run) for run in runs if run.breakdowns for row in rows_of(table([run]))]
    return sorted(rows, key=lambda pair: (pair[0].strategy, pair[0].num_parameters, pair[0].fsdp))


def quiet_step_s(run: RunLog) -> float | None:
    """Median seconds of a step over the log lines that hold no profiled step; None without any.

    Those after the warm-up; of a run that ends before it, all but the first step.
    """
    record, last = run.breakdowns[-1], 0
    times: dict[bool, list[float]] = {True: [], False: []}
    profile_end = record["first_step"] + record["num_steps"] - 1
    for step in run.steps:
        is_quiet = step.step < record["first_step"] or last > profile_end
        if step.step > 1 and is_quiet and step.step_s:
            times[last >= SKIP_STEPS].append(step.step_s)
        last = step.step
    found = times[True] or times[False]
    return statistics.median(found) if found else None
