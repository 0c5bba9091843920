"""What changed against the earlier implementation, size by size?

Its runs stand in data/original.csv (four GH200 nodes, parameters, gradients and optimizer step
offloaded to the host in every FSDP run); ours are logs at the same batch and length, of as many
GPUs or else of fewer.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import study
from analysis import NUM_BYTES, ONE_BY_ONE, SKIP_STEPS, load_published, table
from breakdown import KINDS, shares_of_step
from model_config import TransformerConfig
from run_log import RunLog
from tables import as_text, told, told_row, told_tables

ORIGINAL = Path(__file__).resolve().parent / "data" / "original.csv"
# How the original ran, at batch 1; our runs at another length are compared with none of its.
SAME = {"grad_accumulation_steps": 1, "sequence_length": 4096}
# The profiles that are compared with each other.
ALONE = {"batch_size": 1, "fsdp": False, "gpus": 1, "launched": "", "compiled": True,
         "activation_checkpointing": "none"}  # fmt: skip
RATED = ("matmuls", "attention")
FIGURES = "plots/published/h200"
GIB = 2**30
PUBLISHED_MFU_LOG = "loss_ablation_fsdp/lsai-454149.out"


def read_original() -> list[Any]:
    """A row per configuration and size; repeats are averaged and counted (n)."""
    frame = pd.read_csv(ORIGINAL)
    frame["cut_short"] = frame["status"] == "killed"
    frame["status"] = frame["status"].where(frame["status"] == study.OUT_OF_MEMORY, "trained")
    keys = ["strategy", "factor", "num_parameters", "fsdp", "gpus", "nodes", "status"]
    groups = frame.groupby(keys, dropna=False, sort=False)
    return study.rows_of(groups.agg(
        n=("log", "size"), cut_short=("cut_short", "any"),
        speed=("tokens_per_s", "mean"), mfu_pct=("mfu_pct_from_config", "mean"),
    ).reset_index())  # fmt: skip


def read_points(runs: Sequence[RunLog], *, checkpointed: bool = False) -> list[Any]:
    """Our runs as the original ran but for the batch, with nothing offloaded; repeats pooled.

    Or those that differ in checkpointing too.
    """
    points: Any = study.drawn_points(table(runs), "from-config")[0]
    return [
        row
        for row in study.rows_of(points.assign(speed=points["tokens_per_s"]))
        if all(getattr(row, field) == value for field, value in SAME.items())
        and not study.settings_of(row).get("cpu_offload")
        and row.activation_checkpointing in (("selective", "full") if checkpointed else ("none",))
    ]


def at_batch_1(points: Sequence[Any]) -> list[Any]:
    """Those at the original's batch; a row per size and configuration.

    Raises ValueError where two of our configurations answer to one row.
    """
    return _one_each([row for row in points if row.batch_size == 1])


def _one_each(rows: list[Any]) -> list[Any]:
    # What was run otherwise than by default counts where nothing else was run.
    usual = {_place(row) for row in rows if not study.ways_of(row)}
    rows = [row for row in rows if not study.ways_of(row) or _place(row) not in usual]
    _refuse_twins([_place(row) for row in rows])
    return rows


def _refuse_twins(keys: Sequence[tuple]) -> None:
    if twice := {key for key in keys if keys.count(key) > 1}:
        names = "strategy {}, factor {}, FSDP {}, GPUs {}, batch {}".format(*sorted(twice)[0])
        raise ValueError(f"runs of several configurations, or ends, compete for one row: {names}")


def batch_rows(points: Sequence[Any], ours: Sequence[Any]) -> list[str]:
    """What larger batches give, and how many times the tokens/s of the same settings at batch 1.

    Raises ValueError where two of our configurations answer to one row.
    """
    larger = [row for row in points if row.batch_size > 1 and row.status == "trained"]
    alone = {_key(row): row for row in ours}

    def gain(row: Any) -> float:
        base = alone.get(_key(row))
        if base is None or not _same(base, row, but="batch_size") or not base.speed:
            return math.nan
        return row.speed / base.speed

    return [
        told_row("scaling: batches", row=row, gpus=_gpus(row), gain=gain(row))
        for row in sorted(_one_each(larger), key=_place)
    ]


def checkpointing_rows(checkpointed: Sequence[Any], points: Sequence[Any]) -> list[str]:
    """What checkpointing costs and saves, beside the same size and batch without it.

    Raises ValueError where two of our configurations answer to one row.
    """

    def order(row: Any) -> tuple:
        return *_place(row), row.activation_checkpointing, study.ways_of(row)

    _refuse_twins([order(row) for row in checkpointed])
    cells = []
    for row in sorted(checkpointed, key=order):
        bases = [other for other in points if _key(other) == _key(row)
                 and study.ways_of(other) == study.ways_of(row)
                 and _same(other, row, but="activation_checkpointing")]  # fmt: skip
        bases = [other for other in bases if other.status == "trained"] or bases
        _refuse_twins([order(other) for other in bases])
        base = next(iter(bases), None)
        own, without = (f"{_speed(each)} | {_peak(each)}" for each in (row, base))
        cells.append(told_row("scaling: checkpointing", row=row, gpus=_gpus(row), own=own,
                              without=without))  # fmt: skip
    return cells


def _peak(row: Any) -> str:
    return as_text(row.peak_gib, ".1f") if row and row.status == "trained" else "–"


def _key(row: Any, gpus: int | None = None) -> tuple[str, int, bool, int]:
    return row.strategy, row.factor, row.fsdp, gpus or row.gpus


def _place(row: Any) -> tuple:
    return *_key(row), row.batch_size


def comparison_rows(original: Sequence[Any], ours: Sequence[Any]) -> list[str]:
    """Both at every size that either ran, and the factor between the speeds."""

    def nearest(row: Any) -> Any:
        same = [our for our in ours if _key(our, 1) == _key(row, 1) and our.gpus <= row.gpus]
        return max(same, key=lambda our: our.gpus, default=None)

    pairs = [(row, nearest(row)) for row in original]
    used = {_key(our) for _, our in pairs if our}
    pairs += [(None, row) for row in ours if _key(row) not in used]

    def order(pair: Any) -> tuple:
        row = pair[0] or pair[1]
        return row.strategy, row.fsdp, row.num_parameters, row.gpus

    cells = []
    for theirs, our in sorted(pairs, key=order):
        row: Any = theirs or our
        ratio = our.speed / theirs.speed if theirs and our else math.nan
        sides = (f"{_gpus(side) if side else '–'} | {_speed(side)}" for side in (theirs, our))
        both = dict(zip(("theirs", "ours"), sides, strict=True))
        cells.append(told_row("scaling", row=row, ratio=ratio, **both))
    return cells


def _speed(row: Any) -> str:
    """Cells of tokens/s and MFU."""
    if row is None or row.status == study.OUT_OF_MEMORY:
        return "out of memory | –" if row else "not run | –"
    return f"{as_text(row.speed, ',.0f')} | {as_text(row.mfu_pct, '.2f')}"


def _gpus(row: Any) -> str:
    """How many, and how they were run otherwise than by default (of the original not known)."""
    way = study.ways_of(row) if hasattr(row, "other_flags") else ""
    return ", ".join(filter(None, (f"{row.gpus}{_repeats(row)}", way)))


def _repeats(row: Any) -> str:
    return f" (n={row.n})" * (row.n > 1) + " †" * row.cut_short


def findings(original: Sequence[Any], points: Sequence[Any]) -> list[str]:
    """What the original's runs and our points say, in sentences whose numbers are computed."""
    ours = at_batch_1(points)
    frame = pd.read_csv(ORIGINAL).set_index("log")
    sharded = frame[frame["fsdp"] & frame["mfu_pct_as_logged"].notna()]
    wrong = sharded["mfu_pct_from_config"] / sharded["mfu_pct_as_logged"]
    lines = [told("scaling: MFU", published=frame.loc[PUBLISHED_MFU_LOG], num_wrong=len(wrong),
                  low=wrong.min(), high=wrong.max())]  # fmt: skip
    failed = [row for row in original if row.fsdp and row.status == study.OUT_OF_MEMORY]
    failed = " and ".join(f"`{row.strategy}` {row.factor} on {row.gpus} GPUs" for row in failed)
    wall = told("scaling: wall", reached=_largest(original, fsdp=True), failed=failed)
    single = [row for row in ours if row.gpus == 1 and row.status == "trained"]
    alone, sharded = (_largest(single, fsdp=fsdp) for fsdp in (False, True))
    if alone and sharded:
        wall += " " + told("scaling: our wall", single=alone, sharded=sharded)
    lines.append(wall)
    pairs = _our_pairs(single, single)
    theirs, mine = _shares(_pairs(original, 2)), _shares(pairs)
    if theirs and mine:
        lines.append(told("scaling: costs", theirs=_span(theirs.values()),
                          mine=_span(mine.values())))  # fmt: skip
    usual = [row for row in single if not row.launched]
    one_by_one = [r for r in points if (r.launched, r.batch_size, r.gpus) == (ONE_BY_ONE, 1, 1)]
    slow, graphed = (_shares(_our_pairs(rows, usual)) for rows in (one_by_one, usual))
    if both := sorted(slow.keys() & graphed.keys()):
        lines.append(told(
            "scaling: launching", sizes=_names(both), slow=_span([slow[key] for key in both]),
            graphed=_span([graphed[key] for key in both])))  # fmt: skip
    lines += _gathered([row for row in points if row.gpus > 1 and row.speed > 0])
    gaps = [with_fsdp.peak_gib - without.peak_gib for with_fsdp, without in pairs]
    if gaps := [gap for gap in gaps if not math.isnan(gap)]:
        lines.append(told("scaling: memory", low=min(gaps), high=max(gaps)))
    spare = [(r.peak_reserved_gib - r.peak_gib, r) for r in single if r.fsdp]
    if known := [pair for pair in spare if not math.isnan(pair[0])]:
        gib, most = max(known, key=lambda pair: pair[0])
        gradients_gib = most.num_parameters * NUM_BYTES[most.model_dtype] / GIB
        lines.append(told("scaling: reserved", spare=gib, at=most, gradients=gradients_gib))
    return lines


def _gathered(several: Sequence[Any]) -> list[str]:
    """What keeping parameters gathered gains, where both were run and peaks are known."""
    usual = {_place(row): row for row in several if not study.ways_of(row)}
    both = [(row, base) for row in several
            if study.ways_of(row) == study.KEPT and (base := usual.get(_place(row)))]  # fmt: skip
    both = [pair for pair in both if not math.isnan(pair[0].peak_gib - pair[1].peak_gib)]
    if not both:
        return []
    gains = [100 * row.speed / base.speed - 100 for row, base in both]
    room = [row.peak_gib - base.peak_gib for row, base in both]
    sizes = _names(sorted({_key(row) for row, _ in both}))
    return [told("scaling: gathered", gains=_span(gains), sizes=sizes, room=_span(room))]


def _largest(rows: Sequence[Any], *, fsdp: bool) -> Any:
    """The row of the largest `all` that trained."""
    trained = [r for r in rows if r.strategy == "all" and r.fsdp == fsdp and r.status == "trained"]
    return max(trained, key=lambda row: row.factor, default=None)


def _pairs(rows: Sequence[Any], gpus: int) -> list[tuple[Any, Any]]:
    """(with FSDP on some GPUs, on one GPU without) at each size that trained both ways."""
    trained = {_key(row): row for row in rows if row.status == "trained" and row.speed > 0}
    both = [(row, trained.get((*key[:2], False, 1))) for key, row in trained.items() if key[2]]
    return [(row, base) for row, base in both if base and row.gpus == gpus]


def _held(rows: Sequence[Any], candidates: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(row of ours, one GPU without FSDP at its size, batch and settings, or None)."""
    rows, candidates = ([row for row in each if row.speed > 0] for each in (rows, candidates))
    found = study.bases_of(rows, candidates)
    return [(row, next(iter(bases), None)) for row, bases in zip(rows, found, strict=True)]


def _our_pairs(rows: Sequence[Any], candidates: Sequence[Any]) -> list[tuple[Any, Any]]:
    """`_held` of the rows with FSDP for which there is one."""
    held = _held([row for row in rows if row.fsdp], candidates)
    return [(row, base) for row, base in held if base]


def _same(one: Any, other: Any, *, but: str) -> bool:
    """Whether two rows of ours have the same settings ``but`` one."""
    settings = (study.settings_of(row) | {but: None} for row in (one, other))
    return study.same_settings(*settings)


def _shares(pairs: Sequence[tuple[Any, Any]]) -> dict[tuple, float]:
    """What FSDP leaves of the tokens/s, in per cent, by size."""
    return {_key(row): 100 * row.speed / base.speed for row, base in pairs}


def several_pairs(points: Sequence[Any], published: Path) -> list[tuple[Any, Any]]:
    """`_held` of the points on several GPUs: by one of them, else by a speed of train.py."""
    several = [row for row in points if row.gpus > 1]
    several.sort(key=lambda row: (*_place(row), study.ways_of(row)))
    return _held(several, [*points, *read_points(load_published(published / "h200" / "bench"))])


def several_rows(pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    """What several GPUs leave of the tokens/s of one GPU without FSDP."""
    cells = []
    for row, base in pairs:
        alone = base.speed if base else math.nan
        cells.append(told_row(
            "scaling: several", row=row, repeats=_repeats(row), alone=alone,
            way=study.ways_of(row) or "by default", share=100 * row.speed / alone,
            of_alone=_repeats(base) if base else ""))  # fmt: skip
    return cells


def reasons(profiled: Sequence[tuple[Any, RunLog]]) -> list[str]:
    """Why MFU is what it is, from `study.profiled_runs` of one GPU without FSDP, in sentences.

    Those at the original's batch and settings, on one kind of device, by one version of torch.
    """
    found = [
        _profile(row, run)
        for row, run in profiled
        if all(getattr(row, field) == value for field, value in {**SAME, **ALONE}.items())
        and run.run
    ]
    found = [one for one in found if all(math.isfinite(one[f"{k} rate"]) for k in RATED)]
    if len({(one["row"].device, one["row"].torch_version) for one in found}) > 1:
        return []
    narrow = [one for one in found if one["row"].strategy == "all"]
    wide = next((one for one in found if one["row"].strategy == "n_layers"), None)
    lines = []
    if narrow and narrow[0]["row"].factor < narrow[-1]["row"].factor:
        lines.append(told("scaling: why small", small=narrow[0], large=narrow[-1]))
    if narrow and wide:
        lines.append(told("scaling: why all", narrow=narrow[-1], wide=wide))
    return lines


def _profile(row: Any, run: RunLog) -> dict[str, Any]:
    """Shares of a step (%), and TFLOP/s of its matmuls and its attention (NaN: none ran)."""
    record, shape = run.breakdowns[-1], TransformerConfig(**(run.run or {})["model"])
    shares = shares_of_step(record, study.quiet_step_s(run))
    matmuls = 6 * (row.num_parameters - shape.vocab_size * shape.dim)
    tokens = row.global_batch * row.sequence_length
    flops = dict(zip(RATED, (matmuls, row.flops_per_token - matmuls), strict=True))
    rates = {f"{kind} rate": tokens * n / (record["seconds_per_step"][kind] or math.nan) / 1e12
             for kind, n in flops.items()}  # fmt: skip
    share = 100 * flops["attention"] / row.flops_per_token
    return {**{kind: 100 * value for kind, value in shares.items()}, **rates, "row": row,
            "both": 100 * sum(shares[kind] for kind in RATED), "attention flops": share,
            "head_size": shape.head_size}  # fmt: skip


def _names(keys: Sequence[tuple]) -> str:
    """From the first size to the last, of each strategy."""
    first = {strategy: factor for strategy, factor, *_ in reversed(keys)}
    last = {strategy: factor for strategy, factor, *_ in keys}
    spans = (f"`{name}` {_span((first[name], last[name]))}" for name in last)
    return " and ".join(spans)


def _span(values: Any) -> str:
    ends = dict.fromkeys((f"{min(values):.0f}", f"{max(values):.0f}"))
    return " to ".join(ends)


def cost_summary(published: Path) -> dict[str, Any]:
    """Of one GPU at batch 1: the row of most MFU, and what FSDP leaves of its speeds."""
    points = read_points(load_published(published / "h200" / "scaling"))
    single = [row for row in at_batch_1(points) if row.gpus == 1]
    alone = [row for row in single if not row.fsdp and row.mfu_pct > 0]
    shares = [(100 * row.speed / base.speed, row) for row, base in _our_pairs(single, single)]
    if not alone or not shares:
        return {}
    (low, least), (high, most) = (of(shares, key=lambda pair: pair[0]) for of in (min, max))
    pairs = [(row, base) for row, base in several_pairs(points, published) if base]
    several = ""
    if pairs:
        row, base = max(pairs, key=lambda pair: pair[0].speed / pair[1].speed)
        way = f" with {study.ways_of(row)}" * bool(study.ways_of(row))
        usual = [pair for pair in pairs if not study.ways_of(pair[0])]
        share, *shares = (100 * one.speed / other.speed for one, other in ((row, base), *usual))
        several = " " + told("answers: several", row=row, share=share, way=way,
                             usual=_span(shares or [share]))  # fmt: skip
    return {
        "row": max(alone, key=lambda row: row.mfu_pct), "low": low, "high": high, "least": least,
        "most": most, "several": several,
    }  # fmt: skip


def breakdown_rows(profiled: Sequence[tuple[Any, RunLog]]) -> list[str]:
    """Where the time of a step goes, a row for each of `study.profiled_runs`."""
    cells = []
    for row, run in profiled:
        record = run.breakdowns[-1]
        step_s = study.quiet_step_s(run) or record["wall_s_per_step"]
        shares = (f"{100 * share:.1f}" for share in shares_of_step(record, step_s).values())
        cells.append(told_row(
            "scaling: breakdown", row=row, step_ms=1e3 * step_s, log=Path(row.log).name,
            run=", ".join(filter(None, (study.configuration_of(row), row.launched))),
            shares=" | ".join(shares), num_kernels=record["num_kernels_per_step"]))  # fmt: skip
    return cells


def scaling_section(published: Path) -> str:
    """Figures, comparison, findings and breakdown of the scaling study; empty without its logs.

    Raises ValueError for a log there that cannot be used: evidence must not vanish silently.
    """
    runs = load_published(published / "h200" / "scaling")
    if not runs:
        return ""
    original, points = read_original(), read_points(runs)
    ours, profiled = at_batch_1(points), study.profiled_runs(runs)
    devices = sorted({f"{row.device}, torch {row.torch_version}" for row in ours})
    counted = pd.read_csv(ORIGINAL)["training_tokens_pct"]
    values = {"figures": FIGURES, "devices": "; ".join(devices), "counted": _span(counted)}
    rows = comparison_rows(original, ours)
    compared = told_tables({"scaling": rows}, skip_steps=SKIP_STEPS, **values)
    lines = [*findings(original, points), *reasons(profiled)]
    found = "\n".join(f"- {line}" for line in lines)
    kinds = " | ".join(f"{kind} (%)" for kind in KINDS)
    more = {
        "scaling: several": several_rows(several_pairs(points, published)),
        "scaling: batches": batch_rows(points, ours),
        "scaling: checkpointing": checkpointing_rows(read_points(runs, checkpointed=True), points),
        "scaling: breakdown": breakdown_rows(profiled),
    }
    explained = told_tables(more, figures=FIGURES, kinds=kinds)
    return "\n\n".join(filter(None, (compared, found, explained)))
