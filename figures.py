"""Are the tables of README.md what the published logs say?

    python figures.py            # rewrite them, and draw what fits
    python figures.py --check    # exit status 1 when one is stale, and name it

A block of README.md stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; BLOCKS holds
its heading and the function that writes it from ``logs/published/``. No number about a run is
written by hand; the words stand in data/texts.md.
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

import matplotlib

import fit_report
from analysis import facts, find_logs, load_published, load_runs, mean_metrics
from cli import parse_flags, refuse
from comparison import cost_summary, scaling_section
from link_report import FIGURE, link_section, plot_projection
from loss_figure import plot_comparison
from memory import MODEL_VOCAB_SIZE
from model_config import ScalingStrategy, build_config, count_params
from parity import (
    FACTOR,
    MIN_MOVED_SHARE,
    TABLE_HEAD,
    Comparison,
    compare,
    format_row,
    mismatches,
)
from run_log import RunLog, blaming, read_run, read_runs
from tables import told, told_row, told_tables

MODEL_SIZES: tuple[tuple[ScalingStrategy, int], ...] = (
    *(("all", factor) for factor in (1, 2, 4, 6, 8, 10, 12, 14, 17, 19)),
    *(("n_layers", factor) for factor in (1, 24)),
)
LOSS_FIGURE = Path("plots/published/loss_comparison.png")
WHAT_FITS_FIGURE = Path("plots/published/what_fits.png")


@dataclass(frozen=True)
class FiguresConfig:
    """Rewrite README's tables, and the figures around them, from the published logs."""

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
        what = {"strategy": strategy, "factor": factor, "config": config}
        rows.append(told_row("model sizes", **what, num_parameters=count_params(config)))
    return told_tables({"model sizes": rows})


def bench_table(folder: Path) -> str:
    """Speed of train.py at each shape in a folder of benchmark logs; empty without any.

    A row is the median over the logged windows after the first, which is the warm-up. The folder's
    ceiling.json holds the rate that a large matmul sustained on the same GPU.
    """
    runs, _ = load_runs(folder)
    if not runs:
        return ""
    runs.sort(key=lambda run: (facts(run).strategy, facts(run).factor, facts(run).batch_size))
    with blaming(path := folder / "ceiling.json"):
        ceiling = json.loads(path.read_text())
        rows = [_bench_row(run, ceiling["tflops"]) for run in runs]
        return told_tables({"bench": rows}, **ceiling)


def _bench_row(run: RunLog, ceiling_tflops: float) -> str:
    with blaming(run.path):
        what, window = facts(run), (run.run or {})["config"]["logging_frequency"]
    how = mean_metrics(run, skip_steps=window)
    rates = [step.tokens_per_s for step in run.steps if step.step > window] or [math.nan]
    speed = how.tokens_per_s_median or math.nan
    tflops = speed * what.flops_per_token / 1e12
    return told_row(
        "bench", what=what, speed=speed, spread=100 * (max(rates) - min(rates)) / speed,
        mfu=100 * tflops / (what.peak_tflops or math.nan), of_matmul=100 * tflops / ceiling_tflops,
        peak_gib=how.peak_gib, compile_s=(run.end or {}).get("seconds", {}).get("compile"),
        status=what.status.replace("_", " "), log=run.path.name,
    )  # fmt: skip


def what_fits_tables(folder: Path) -> str:
    """The tables of the fitting experiment in a folder of its logs; empty without any."""
    if not (searches := fit_report.read_searches(folder)):
        return ""
    tables = {
        "fits: searches": fit_report.search_rows(folder),
        "fits: measured": fit_report.measured_rows(folder),
        "fits: simulated": fit_report.simulated_rows(folder),
        "fits: errors": fit_report.error_rows(folder),
    }
    return told_tables(tables, min_peak_gib=fit_report.MIN_PEAK_GIB, **(searches[0].run or {}))


def what_fits(published: Path) -> str:
    """The fitting experiment on one H200, with its figure."""
    folder = published / "h200" / "what_fits"
    shown = f"![What trains on how many GPUs]({WHAT_FITS_FIGURE})\n\n"
    text = shown * bool(fit_report.simulated_rows(folder)) + what_fits_tables(folder)
    trainings = [folder.parent / name for name in ("scaling", "bench")] if text else []
    found = [fit_report.training_errors(each) for each in trainings]
    allocated, reserved = ([e for each in found for e in each[kind]] for kind in (0, 1))
    if not allocated:
        return text
    worst = [max(map(abs, errors), default=0.0) for errors in (allocated, reserved)]
    words = told("fits: trainings", num_runs=len(allocated), num_with_room=len(reserved),
                 worst=worst, min_peak_gib=fit_report.MIN_PEAK_GIB)  # fmt: skip
    return f"{text}\n\n{words}"


def checkpoint_table(folder: Path) -> str:
    """What a save and a resume cost, from the three logs that bench_checkpoint.py writes, if any.

    ``added_s`` is how much longer the step with the copy took than the median without
    saves, ``saving_step_s`` the median of the steps that began before the save was on disk.
    """
    names = ("without", "saving", "resumed")
    if not (folder / "resumed.out").exists():
        return ""
    without, saving, resumed = (read_run(folder / f"{name}.out") for name in names)
    save = saving.checkpoints[0]
    usual_s = statistics.median(step.step_s or 0.0 for step in without.steps[2:])
    with_copy, *after = [step.step_s or 0.0 for step in saving.steps if step.step > save["step"]]
    starts = itertools.accumulate(after, initial=with_copy)
    during = [step_s for step_s, at in zip(after, starts, strict=False) if at < save["seconds"]]
    anew, setup, again = ((run.end or {})["seconds"] for run in (without, saving, resumed))
    return told(
        "checkpoint", what=facts(saving), num_steps=len(saving.steps), save=save, step_s=usual_s,
        added_s=with_copy - usual_s, saving_step_s=statistics.median(during or [with_copy]),
        anew=anew, setup=setup, again=again,
    )  # fmt: skip


def parity_comparisons(folder: Path) -> list[tuple[str, Comparison]]:
    """`compare_runs` of the logs in a folder that can be used."""
    return compare_runs(load_runs(folder)[0])


def compare_runs(runs: Sequence[RunLog]) -> list[tuple[str, Comparison]]:
    """(configuration, comparison) of each run with FSDP.

    Against all runs without FSDP that share what parity needs (model, data, seed, …).
    """
    plain, found = [run for run in runs if not facts(run).fsdp], []
    for run in (run for run in runs if facts(run).fsdp):
        same = [each for each in plain if not mismatches([run, each])]
        if same:
            found.append((_parity_name(run), compare([run], same)))
    return sorted(found)


def _parity_name(run: RunLog) -> str:
    what, config = facts(run), (run.run or {})["config"]
    name = f"`{what.strategy}` {what.factor} {what.model_dtype}, {what.gpus} × {what.batch_size}"
    if what.grad_accumulation_steps > 1:
        name += f" × {what.grad_accumulation_steps} accumulated"
    ranks = " → ".join(str(attempt["world_size"]) for attempt in run.runs)
    on_gpu = (run.run or {}).get("device_type") == "cuda"
    details = {
        f"resumed: {ranks} ranks": len(run.runs) > 1,
        f"{what.replicas} replicas": what.replicas > 1,
        "not compiled": on_gpu and not config["compile"],
        f"{what.activation_checkpointing} checkpointing": what.activation_checkpointing != "none",
        "CPU offload": config.get("cpu_offload") is True,
        "no reshard": config.get("reshard_after_forward") is False,
        "one padded document a row": config.get("packing") is False,
    }
    return ", ".join([name, *(words for words, holds in details.items() if holds)])


def parity_table(comparisons: Sequence[tuple[str, Comparison]]) -> str:
    """Markdown table of `parity_comparisons`; empty without any."""
    rows = [format_row(name, comparison) for name, comparison in comparisons]
    return "\n".join([TABLE_HEAD, *rows]) if rows else ""


@dataclass(frozen=True)
class ParitySeries:
    """The published runs on one kind of device, and what their comparisons found."""

    where: str
    runs: list[RunLog]
    comparisons: list[tuple[str, Comparison]]

    @property
    def verdict(self) -> str:
        """How many ways of running FSDP are equal to no FSDP."""
        verdicts = [each.verdict for _, each in self.comparisons]
        compared = {name for name, _ in self.comparisons}
        each = [facts(run) for run in self.runs if _parity_name(run) in compared]
        num_whole = sum(what.gpus == what.replicas for what in each if what.fsdp)
        of_them = "all" if num_whole == len(verdicts) else f"{num_whole} of them"
        whole = f", {of_them} with the whole model on each rank" * (num_whole > 0)
        return f"{verdicts.count('equal')} of {len(verdicts)} on {self.where}{whole}"


def parity_series(published: Path) -> tuple[ParitySeries, ParitySeries]:
    """The series on CPU ranks and on GPUs. Raises ValueError for a log that cannot be used."""

    def read(where: str, device: str) -> ParitySeries:
        runs = load_published(published / device / "parity")
        return ParitySeries(where, runs, compare_runs(runs))

    return read("CPU ranks", "cpu"), read("H200s", "h200")


def parity(published: Path) -> str:
    """FSDP against training without it: on CPU ranks, with planted faults, and on a GPU."""
    on_cpu, on_gpu = parity_series(published)
    if not on_cpu.comparisons:
        return ""
    return told(
        "parity", verdicts=f"{on_cpu.verdict}; {on_gpu.verdict}", on_gpus=_gpu_parity(on_gpu),
        table=parity_table(on_cpu.comparisons), faults=_fault_table(published),
        commits=_commits(on_cpu.runs),
    )  # fmt: skip


def answers(published: Path) -> str:
    """The three questions, each answered in a sentence from the published logs."""
    on_cpu, on_gpu = parity_series(published)
    fits = fit_report.best_factors(published / "h200" / "what_fits")
    costs = cost_summary(published)
    lines = [
        told("answers: fits", **fits) if fits else "",
        told("answers: parity", verdicts=f"{on_cpu.verdict}; {on_gpu.verdict}"),
        told("answers: costs", **costs) if costs else "",
    ]
    return "\n".join(f"- {line}" for line in lines if line)


def _gpu_parity(series: ParitySeries) -> str:
    if not series.comparisons:
        return ""
    runs = [run for run in series.runs if facts(run).fsdp]
    moved = [each.moved_share for name, each in series.comparisons if "bf16" in name]
    known = [share for share in moved if share is not None] or [math.nan]
    devices = sorted({f"{facts(run).device}, torch {facts(run).torch_version}" for run in runs})
    words = told("parity: GPUs", devices="; ".join(devices), moved_pct=100 * min(known),
                 most_pct=100 * max(known), enough_pct=100 * MIN_MOVED_SHARE,
                 unequal="".join(_unequal(*each) for each in series.comparisons),
                 commits=_commits(series.runs), figure=LOSS_FIGURE)  # fmt: skip
    return f"{words}\n\n{parity_table(series.comparisons)}\n\n"


def _unequal(name: str, found: Comparison) -> str:
    """What of a run is outside the limit, as a sentence; empty of one that is equal."""
    outside = {
        kind: sum(gap.ratio > FACTOR for gap in gaps)
        for kind, gaps in (("losses", found.losses), ("norms", found.grad_norms),
                           ("weights", found.weights[1:]))
    }  # fmt: skip
    if found.verdict == "equal":
        return ""
    return " " + told("parity: unequal", run=name, num_steps=len(found.losses),
                      num_weights=len(found.weights[1:]), **outside)  # fmt: skip


def _commits(runs: Sequence[RunLog]) -> str:
    """Commits that runs were made at."""
    records = [run.run or {} for run in runs]
    named = {r["commit"][:7] + " with changes" * bool(r["dirty"]) for r in records}
    return ", ".join(sorted(named))


def _fault_table(published: Path) -> str:
    rows = [TABLE_HEAD.replace("configuration", "fault")]
    for folder in sorted((published / "cpu").glob("faults*")):
        runs = load_published(folder)
        references = [run for run in runs if not facts(run).fsdp]
        if not references:
            raise ValueError(f"{folder} holds no references")
        for run in sorted((run for run in runs if facts(run).fsdp), key=lambda run: run.path):
            # The log does not know of the fault that was planted: its name is that of the file.
            name = run.path.stem.removeprefix("fault_").replace("_", " ")
            name += f", {facts(run).model_dtype}"
            rows.append(format_row(name, compare([run], references)))
    return "\n".join(rows)


# Block of README -> its heading, and what writes it, given the folder of published logs.
BLOCKS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "answers": ("", answers),
    "bench": ("How fast, and how close to the chip", lambda logs: bench_table(logs / "h200/bench")),
    "checkpoint": ("What a checkpoint costs", lambda at: checkpoint_table(at / "h200/checkpoint")),
    "links": ("What does the link cost?", lambda logs: link_section(logs / "h200/links")),
    "parity": ("Is FSDP correct?", parity),
    "model-sizes": ("", model_sizes),
    "scaling": ("What does it cost?", scaling_section),
    "what-fits": ("What fits?", what_fits),
}


def check_devices(folder: Path) -> None:
    """Raise ValueError for a log in a folder, or in one below, that is not of a run on GPUs."""
    for path in find_logs(folder):
        with blaming(path):
            for run in read_runs(path):
                if (device := (run.run or {}).get("device_type")) != "cuda":
                    raise ValueError(f"its device is {device}, not cuda")


def render(text: str, published: Path) -> tuple[str, list[str]]:
    """The text with every block made anew, and the names of those that were stale.

    Raises ValueError where a block is missing, stands twice, is not closed, or is not known, and
    for a log that cannot be used.
    """
    check_devices(published / "h200")
    marked = re.findall(r"^<!-- (?:begin|end) (.*) -->$", text, re.MULTILINE)
    if unknown := sorted(set(marked) - set(BLOCKS)):
        raise ValueError(f"no function writes the block {', '.join(unknown)}")
    stale = []
    for name, (heading, write) in BLOCKS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"the block {name} must stand once, between its two markers")
        start, stop = text.index(begin) + len(begin), text.index(end)
        with blaming(f"the block {name}"):
            content = write(published)
        if content:
            title = f"### {heading}\n\n" if heading else ""
            content = f"{title}{content}\n"
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
    if fit_report.simulated_rows(fits := config.published / "h200" / "what_fits"):
        fit_report.plot_what_fits(fits, config.readme.parent / WHAT_FITS_FIGURE)
    if stale:
        config.readme.write_text(text, encoding="utf-8")
    found = dict(parity_comparisons(config.published / "h200" / "parity"))
    if comparison := found.get("`all` 8 bf16, 2 × 4, full checkpointing"):
        what = "all 8 in bf16: FSDP over two GPUs against no FSDP"
        plot_comparison(comparison, config.readme.parent / LOSS_FIGURE, what)
    plot_projection(config.published / "h200" / "links", config.readme.parent / FIGURE)
    print(f"{config.readme}: rewrote {', '.join(stale) or 'nothing, all blocks are up to date'}")


if __name__ == "__main__":
    matplotlib.use("agg")
    main(parse_flags(FiguresConfig))
