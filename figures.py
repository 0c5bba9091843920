"""Are the tables of README.md what the published logs say?

    python figures.py            # rewrite them, and draw what fits
    python figures.py --check    # exit status 1 when one is stale, and name it

A block of README.md stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; BLOCKS holds
the function that writes it from ``logs/published/``. No number about a run is written by hand.
"""

import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

import fit_report
from analysis import (
    SKIP_STEPS,
    facts,
    format_number,
    load_published,
    load_runs,
    markdown_table,
    mean_metrics,
)
from cli import parse_flags, refuse
from comparison import scaling_section
from link_report import FIGURE, link_section, plot_projection
from memory import MODEL_VOCAB_SIZE
from model_config import ScalingStrategy, build_config, count_params
from parity import TABLE_HEAD, Comparison, compare, format_row, mismatches
from run_log import RunLog, read_run

MODEL_SIZES: tuple[tuple[ScalingStrategy, int], ...] = (
    *(("all", factor) for factor in (1, 2, 4, 6, 8, 10, 12, 14, 17, 19)),
    *(("n_layers", factor) for factor in (1, 24)),
)
WHAT_FITS_FIGURE = Path("plots/published/what_fits.png")


@dataclass(frozen=True)
class FiguresConfig:
    """Flags of this script."""

    check: bool = False
    """Change nothing; exit with status 1 when a block is stale."""
    readme: Path = Path("README.md")
    """File whose blocks are written."""
    published: Path = Path("logs/published")
    """Folder of the logs that the blocks are made from."""


def model_sizes(published: Path) -> str:
    """Shape and parameters of some scaling factors; from the configuration, not from a log."""
    rows = []
    for strategy, factor in MODEL_SIZES:
        config = build_config(strategy, factor, MODEL_VOCAB_SIZE)
        shape = (factor, config.dim, config.n_layers, config.n_heads, count_params(config))
        rows.append([f"`{strategy}`", *(f"{number:,}" for number in shape)])
    return markdown_table(["strategy", "factor", "dim", "layers", "heads", "parameters"], rows)


def core_runs(published: Path) -> str:
    """A row per run in ``h200/core``; nothing while there is no log.

    Raises ValueError for a log there that cannot be used: evidence must not vanish silently.
    """
    runs = load_published(published / "h200" / "core")
    if not runs:
        return ""
    header = (
        "run | model | parameters | batch × length | dtype | steps | loss, first → last"
        " | tokens/s per GPU | MFU (%) | peak GiB | log"
    )
    runs = sorted(runs, key=lambda run: (facts(run).num_parameters, facts(run).fsdp, run.path))
    table = markdown_table(header.split(" | "), [_core_row(run, published) for run in runs])
    compiled = sorted({"compiled" if facts(run).compiled else "not compiled" for run in runs})
    return (
        "### What the training scripts do on one GPU\n\n"
        f"{_devices(runs)}; {', '.join(compiled)}. These runs check one script against the"
        " other; the speed of the defaults stands below. FSDP on one rank shards nothing and still"
        " gathers, copies and reduces. (These FSDP runs still kept an fp32 copy of all gradients,"
        " which the code no longer does: LOG.md.) Tokens/s are the median over the log lines after"
        " step"
        f" {SKIP_STEPS};"
        " MFU comes from their mean; memory is what the allocator had allocated at its peak.\n\n"
        + table
    )


def _core_row(run: RunLog, published: Path) -> list[str]:
    what, how = facts(run), mean_metrics(run)
    ranks = f"FSDP, {what.gpus} rank{'s' * (what.gpus > 1)}" if what.fsdp else "no FSDP"
    losses = f"{run.steps[0].loss:.4f} → {run.steps[-1].loss:.4f}" if run.steps else "n/a"
    name = run.path.relative_to(published)
    return [
        ranks if what.status == "completed" else f"{ranks}: {what.status.replace('_', ' ')}",
        f"`{what.strategy}` {what.factor}",
        f"{what.num_parameters:,}",
        f"{what.batch_size} × {what.sequence_length}",
        str(what.model_dtype),
        str(run.steps[-1].step if run.steps else 0),
        losses,
        format_number(how.tokens_per_s_median, ",.0f"),
        format_number(how.mfu_pct, ".2f"),
        format_number(how.peak_gib, ".2f"),
        f"[{name.name}](logs/published/{name.as_posix()})",
    ]


def bench_table(folder: Path) -> str:
    """Speed of train.py at each shape in a folder of benchmark logs; empty without any.

    A row is the median over the logged windows after the first, which is the warm-up. The folder's
    ceiling.json holds the rate that a large matmul sustained on the same GPU.
    """
    runs, _ = load_runs(folder)
    if not runs:
        return ""
    ceiling = json.loads((folder / "ceiling.json").read_text())
    header = (
        "model | batch | tokens/s | spread (%) | MFU (%) | of the ceiling (%) | peak GiB"
        " | compiling (s) | status | log"
    )
    runs.sort(key=lambda run: (facts(run).strategy, facts(run).factor, facts(run).batch_size))
    return (
        f"{ceiling['device']}, torch {ceiling['torch']}, bf16, sequence 4096, the defaults of"
        " train.py; n = 3 windows of one run (after a first one, the warm-up), median and spread."
        " A bf16 matmul of"
        f" {ceiling['size']:,}² sustained {ceiling['tflops']:.0f} TFLOP/s there"
        f" ({ceiling['lowest']:.0f} to {ceiling['highest']:.0f}): the ceiling. Compiling comes"
        " before the end of the first step; what was compiled for an earlier run is not compiled"
        " again.\n\n"
        + markdown_table(header.split(" | "), [_bench_row(run, ceiling["tflops"]) for run in runs])
    )


def _bench_row(run: RunLog, ceiling_tflops: float) -> list[str]:
    what = facts(run)
    window = (run.run or {})["config"]["logging_frequency"]
    how = mean_metrics(run, skip_steps=max(window, SKIP_STEPS))
    rates = [step.tokens_per_s for step in run.steps if step.step > max(window, SKIP_STEPS)]
    middle = how.tokens_per_s_median or 0.0
    tflops = middle * what.flops_per_token / 1e12
    mfu = 100 * tflops / what.peak_tflops if what.peak_tflops else None
    spread = 100 * (max(rates) - min(rates)) / middle if middle else None
    return [
        f"`{what.strategy}` {what.factor}",
        str(what.batch_size),
        format_number(middle or None, ",.0f"),
        format_number(spread, ".1f"),
        format_number(mfu, ".1f"),
        format_number(100 * tflops / ceiling_tflops, ".1f"),
        format_number(how.peak_gib, ".1f"),
        format_number((run.end or {}).get("seconds", {}).get("compile"), ".1f"),
        what.status.replace("_", " "),
        run.path.name,
    ]


def bench(published: Path) -> str:
    """The benchmark on one H200."""
    table = bench_table(published / "h200" / "bench")
    return f"### How fast, and how close to the chip\n\n{table}" if table else ""


def what_fits_tables(folder: Path) -> str:
    """The tables of the fitting experiment in a folder of its logs; empty without any."""
    if not folder.exists() or not fit_report.read_searches(folder):
        return ""
    run = fit_report.read_searches(folder)[0].run or {}
    errors = "predicted GiB | measured GiB | error (%)"
    tables = (
        (
            f"{run['device']}, torch {run['versions']['torch']}, bf16, sequence"
            f" {run['config']['sequence_length']:,}, one row. The largest model that fits one"
            " device: `load`, its parameters; `train`, two steps (and, where the table says"
            " so, five of train.py at the answer). The limit of 91.7 GiB is what the earlier"
            " experiment had.",
            "mode | strategy | checkpointing | limit GiB | largest factor | parameters | "
            f"{errors} | probes | seconds | at the answer | log",
            fit_report.search_rows(folder),
        ),
        (
            "On more GPUs, under FSDP, **simulated**: one real rank of a world whose collectives"
            " do nothing (real memory and compute, no communication).",
            f"GPUs | strategy | checkpointing | largest factor | parameters | {errors}",
            fit_report.simulated_rows(folder),
        ),
        (
            "The memory model (`memory.py`) against the allocator, every run above"
            f" {fit_report.MIN_PEAK_GIB:.0f} GiB on one device without FSDP:",
            f"strategy | factor | rows | checkpointing | compiled | {errors}",
            fit_report.error_rows(folder),
        ),
    )
    return "\n\n".join(
        f"{text}\n\n{markdown_table(header.split(' | '), rows)}"
        for text, header, rows in tables
        if rows
    )


def what_fits(published: Path) -> str:
    """The fitting experiment on one H200, with its figure."""
    tables = what_fits_tables(published / "h200" / "what_fits")
    if not tables:
        return ""
    shown = f"![What trains on how many GPUs]({WHAT_FITS_FIGURE})\n\n"
    drawn = fit_report.simulated_bests(published / "h200" / "what_fits")
    return f"### What fits?\n\n{shown if drawn else ''}{tables}"


def checkpoint_costs(folder: Path) -> dict[str, Any]:
    """What a save and a resume cost, from the three logs that bench_checkpoint.py writes.

    Seconds; ``added_s`` is how much longer the step with the copy took than the median without
    saves, ``saving_step_s`` the median of the steps that began before the save was on disk.
    """
    without, saving, resumed = (
        read_run(folder / f"{name}.out") for name in ("without", "saving", "resumed")
    )
    save = saving.checkpoints[0]
    usual_s = statistics.median(step.step_s or 0.0 for step in without.steps[2:])
    with_copy, *after = [step.step_s or 0.0 for step in saving.steps if step.step > save["step"]]
    starts = itertools.accumulate(after, initial=with_copy)
    during = [step_s for step_s, at in zip(after, starts, strict=False) if at < save["seconds"]]
    waits = [(run.end or {})["seconds"] for run in (without, resumed)]
    return {
        "step_s": usual_s,
        "added_s": with_copy - usual_s,
        "saving_step_s": statistics.median(during or [with_copy]),
        **{name: save[name] for name in ("stopped_s", "seconds", "gib")},
        "first_step_anew_s": waits[0]["until first step"],
        "first_step_resumed_s": waits[1]["until first step"],
        "restore_s": waits[1]["restore"],
    }


def checkpoint_table(folder: Path) -> str:
    """Markdown of `checkpoint_costs`; empty without the logs."""
    if not (folder / "resumed.out").exists():
        return ""
    costs, what = checkpoint_costs(folder), facts(read_run(folder / "saving.out"))
    rows = [
        ["a step without a save", f"{costs['step_s']:.3f} s"],
        ["training stopped for the copy to the host", f"{costs['stopped_s']:.3f} s"],
        ["added to that step", f"{costs['added_s']:.3f} s"],
        ["a step while the copy was written", f"{costs['saving_step_s']:.3f} s"],
        ["until the checkpoint was whole on disk", f"{costs['seconds']:.1f} s"],
        ["its size", f"{costs['gib']:.2f} GiB"],
        ["until the first step was done, from the seed", f"{costs['first_step_anew_s']:.1f} s"],
        ["the same, from the checkpoint", f"{costs['first_step_resumed_s']:.1f} s"],
        ["of it, reading the checkpoint", f"{costs['restore_s']:.1f} s"],
    ]
    return (
        f"{what.device}, torch {what.torch_version}, `{what.strategy}` {what.factor},"
        f" {what.batch_size} × {what.sequence_length}, {what.model_dtype}; one save in a run of"
        f" {len(read_run(folder / 'saving.out').steps)} steps, and a run that goes on from it"
        " (`python benchmarks/bench_checkpoint.py`). The checkpoint is read while it may still be"
        " in the host's memory; the time until the first step begins when torch is imported.\n\n"
        + markdown_table(["asynchronous save", "`train.py`"], rows)
    )


def checkpoint(published: Path) -> str:
    """Saving and resuming on one H200."""
    table = checkpoint_table(published / "h200" / "checkpoint")
    return f"### What a checkpoint costs\n\n{table}" if table else ""


def parity_comparisons(folder: Path) -> list[tuple[str, Comparison]]:
    """(configuration, comparison) of each FSDP run in a folder.

    Against all runs without FSDP there that share what parity needs (model, data, seed, …).
    """
    runs, _ = load_runs(folder)
    found = []
    for run in (run for run in runs if facts(run).fsdp):
        references = [
            other for other in runs if not facts(other).fsdp and not mismatches([run, other])
        ]
        if references:
            found.append((_parity_name(run), compare([run], references)))
    return sorted(found)


def _parity_name(run: RunLog) -> str:
    what, config = facts(run), (run.run or {})["config"]
    name = f"`{what.strategy}` {what.factor} {what.model_dtype}, {what.gpus} × {what.batch_size}"
    if what.grad_accumulation_steps > 1:
        name += f" × {what.grad_accumulation_steps} accumulated"
    if len(run.runs) > 1:
        ranks = (str(attempt["world_size"]) for attempt in run.runs)
        name += f", resumed: {' → '.join(ranks)} ranks"
    if what.replicas > 1:
        name += f", {what.replicas} replicas"
    if not config["compile"] and (run.run or {}).get("device_type") == "cuda":
        name += ", not compiled"
    if what.activation_checkpointing != "none":
        name += f", {what.activation_checkpointing} checkpointing"
    changed = {"cpu_offload": True, "reshard_after_forward": False, "packing": False}
    words = {"cpu_offload": "CPU offload", "reshard_after_forward": "no reshard"}
    for flag, value in changed.items():
        if config.get(flag) == value:
            name += f", {words.get(flag, 'one padded document a row')}"
    return name


def parity_table(folder: Path) -> str:
    """Markdown table of `parity_comparisons`; empty without any."""
    rows = [format_row(name, comparison) for name, comparison in parity_comparisons(folder)]
    return "\n".join([TABLE_HEAD, *rows]) if rows else ""


def parity(published: Path) -> str:
    """FSDP against training without it: on CPU ranks, with planted faults, and on a GPU."""
    table = parity_table(published / "cpu" / "parity")
    if not table:
        return ""
    return (
        "### Is FSDP correct?\n\n"
        f"{_parity_sentence(published)} A run is compared with three or more runs without FSDP"
        " that differ only in the order of their sums (8 micro-batches of 1 row, 4 of 2, 2 of 4):"
        " what those differ by is the floor, and FSDP is equal when no difference of loss, grad"
        " norm or final weights, at any step, exceeds 4 floors (each step has its own,"
        " so the last number is not the quotient of two others). First column: ranks × rows.\n\n"
        f"{_gpu_parity(published)}"
        "On the CPU (`make parity`): 30 steps, some of them clipped, a vocabulary of 512 words.\n\n"
        f"{table}\n\n"
        "The same judgement on two ranks, without and with faults planted"
        " (`python tests/fault_series.py FOLDER`):\n\n" + _fault_table(published)
    )


def _parity_sentence(published: Path) -> str:
    told = []
    for where, device in (("the CPU", "cpu"), ("one H200", "h200")):
        verdicts = [found.verdict for _, found in parity_comparisons(published / device / "parity")]
        if verdicts:
            told.append(f"{verdicts.count('equal')} of {len(verdicts)} on {where}")
        else:
            told.append(f"no series on {where} is published yet (LOG.md has what was tried)")
    return f"**Ways of running FSDP that are equal to no FSDP: {'; '.join(told)}.**"


def _gpu_parity(published: Path) -> str:
    folder = published / "h200" / "parity"
    table = parity_table(folder)
    if not table:
        return ""
    runs = [run for run in load_runs(folder)[0] if facts(run).fsdp]
    series = "two-gpus" if any(facts(run).gpus > 1 for run in runs) else "one-gpu"
    ends = [run.end for run in runs if run.end and facts(run).model_dtype == "bf16"]
    moved = min((end["digest"]["moved_share"] for end in ends), default=math.nan)
    return (
        f"On {_devices(runs)} (`python benchmarks/parity_series.py --where {series}`): 30 steps,"
        " real vocabulary, global batch 8. In bf16 the 30 steps moved at least"
        f" {100 * moved:.0f} % of the weights: an embedding of standard deviation 1 hardly moves in"
        " steps that bf16 can show.\n\n"
        f"{table}\n\n"
    )


def _devices(runs: Sequence[RunLog]) -> str:
    return "; ".join(sorted({f"{facts(r).device}, torch {facts(r).torch_version}" for r in runs}))


def _fault_table(published: Path) -> str:
    runs, _ = load_runs(published / "cpu" / "faults")
    references = [run for run in runs if not facts(run).fsdp]
    faults = [
        # The log does not know of the fault that was planted: its name is that of the file.
        format_row(
            run.path.stem.removeprefix("fault_").replace("_", " "), compare([run], references)
        )
        for run in sorted(runs, key=lambda run: run.path)
        if facts(run).fsdp
    ]
    return "\n".join([TABLE_HEAD.replace("configuration", "fault"), *faults])


def links(published: Path) -> str:
    """What the link between GPUs costs, measured on two of them and projected to many."""
    section = link_section(published / "h200" / "links")
    return f"### What does the link cost?\n\n{section}" if section else ""


# Block of README -> what writes it, given the folder of published logs.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "bench": bench,
    "checkpoint": checkpoint,
    "core-runs": core_runs,
    "links": links,
    "parity": parity,
    "model-sizes": model_sizes,
    "scaling": scaling_section,
    "what-fits": what_fits,
}


def render(text: str, published: Path) -> tuple[str, list[str]]:
    """The text with every block made anew, and the names of those that were stale.

    Raises ValueError where a block is missing, stands twice, is not closed, or is not known.
    """
    marked = re.findall(r"^<!-- (?:begin|end) (.*) -->$", text, re.MULTILINE)
    if unknown := sorted(set(marked) - set(BLOCKS)):
        raise ValueError(f"no function writes the block {', '.join(unknown)}")
    stale = []
    for name, write in BLOCKS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"the block {name} must stand once, between its two markers")
        start, stop = text.index(begin) + len(begin), text.index(end)
        content = write(published)
        content = f"{content}\n" if content else ""
        if text[start:stop] != content:
            stale.append(name)
        text = text[:start] + content + text[stop:]
    return text, stale


def main(config: FiguresConfig) -> None:
    """Rewrite the stale blocks and draw what fits, or only name what is stale."""
    try:
        text, stale = render(config.readme.read_text(encoding="utf-8"), config.published)
    except (OSError, ValueError) as error:
        refuse(f"{config.readme}: {error}")
    if config.check:
        if stale:
            print(f"{config.readme}: stale: {', '.join(stale)}; run make figures", file=sys.stderr)
        sys.exit(bool(stale))
    if fit_report.simulated_bests(fits := config.published / "h200" / "what_fits"):
        fit_report.plot_what_fits(fits, config.readme.parent / WHAT_FITS_FIGURE)
    if stale:
        config.readme.write_text(text, encoding="utf-8")
    plot_projection(config.published / "h200" / "links", config.readme.parent / FIGURE)
    print(f"{config.readme}: rewrote {', '.join(stale) or 'nothing, all blocks are up to date'}")


if __name__ == "__main__":
    matplotlib.use("agg")
    main(parse_flags(FiguresConfig))
