"""What does it cost? Job logs become one table of runs, and figures against model size.

    python plots.py [--logs logs] [--output-dir plots] [--skip-steps N] [--mfu as-logged]

Writes results.csv and results.md (one row per run, failed ones too) and the figures as PNG and
SVG. A colour is a configuration (GPUs, FSDP or not); a marker is whatever else differs between the
runs: such runs never share a line. Repeats of one configuration are pooled, and counted (n=).
"""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

import study
from analysis import MFU_TOLERANCE, SKIP_STEPS, SKIP_STEPS_LEGACY, load_runs, table
from breakdown import IDLE, KINDS, shares_of_step
from cli import check_flags, parse_flags, refuse
from run_log import RunLog
from tables import told_row, told_tables

MARKERS, DASHES = "osD^vP<>Xh", ("-", "--", ":", "-.")
# Settings that a caption names where all runs share them.
CAPTION_FIELDS = ("device", "torch_version", "model_dtype", "compute_dtype", "sequence_length",
                  "batch_size", "activation_checkpointing", "compiled")  # fmt: skip
MAX_VARIANTS = 10  # in a legend
NUM_COLUMNS, COLUMN_CHARS = 3, 30  # of a legend
CLOSE = 0.045  # share of an axis in which there is no room for two factors
MAX_TICKS = 6  # as many labels as half a figure has room for
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
FOUR = ("tokens_per_sec", "training_tokens_pct", "mfu", "tflops")
LABELS = {
    "tokens_per_sec": "Tokens per second per GPU",
    "training_tokens_pct": "Training tokens (% of positions)",
    "mfu": "MFU (% of the dense bf16 peak)",
    "tflops": "TFLOP/s per GPU",
    "scaling_efficiency": "Tokens/s per GPU (% of one GPU without FSDP)",
    "peak_memory": "Peak memory per GPU (GiB)",
}
READING = "Points: median of the logged steps after the warm-up; bars: quartiles, range of repeats."
# Why a panel has no point.
REASONS = {
    "mfu": "no peak is known for the device",
    "scaling_efficiency": "no run on one GPU without FSDP has the same size, batch and settings",
}
READINGS = {
    "scaling_efficiency": f"{READING} Sizes that were not run on one GPU without FSDP are missing.",
    "peak_memory": "Points: allocated at the peak; bars reach up to what was reserved.",
}


@dataclass(frozen=True)
class PlotsConfig:
    """Turn all job logs in a folder into one table of runs, and figures against model size."""

    logs: Path = Path("logs")
    """Folder that is searched for job logs (*.out, *.log), with all folders in it."""
    output_dir: Path = Path("plots")
    """Folder of the table and the figures."""
    skip_steps: int | None = None
    """Leave out steps up to this one (default: 10; 1 in logs of the earlier implementation)."""
    mfu: Literal["from-config", "as-logged"] = "from-config"
    """MFU and TFLOPs computed from the configuration, or as the log has them."""

    def __post_init__(self) -> None:
        check_flags(self, "skip_steps", "not be negative", lambda num: num is None or num >= 0)


def main(config: PlotsConfig) -> None:
    """Read the logs, write table and figures. ValueError for logs that cannot be used at all."""
    if not config.logs.is_dir():
        raise ValueError(f"there is no folder {config.logs}")
    runs, unusable = load_runs(config.logs)
    if not runs:
        reason = f"; {unusable[0][0]}: {unusable[0][1]}" if unusable else " (*.out, *.log)"
        raise ValueError(f"no job log of a training in {config.logs}{reason}")
    frame = runs_table(config, runs)
    points, left_out = study.drawn_points(frame, config.mfu)
    left_out = [*(f"{_below(path, config)}: {reason}" for path, reason in unusable), *left_out]
    lines = study.split_lines(points)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    (config.output_dir / "results.csv").write_text(results_csv(frame), "utf-8")
    notes = [*table_notes(frame, config), *(f"left out: {line}" for line in left_out)]
    if not any(run.breakdowns for run in runs):
        notes.append("no breakdown of a step: no run was profiled (--profile)")
    if not lines:
        notes.append("no figure: no run has a step to average, or was out of memory")
    text = results_table(frame) + "\n\n" + "".join(f"- {note}\n" for note in notes)
    # A name of a file or script may hold bytes that are no text.
    (config.output_dir / "results.md").write_text(text, "utf-8", errors="backslashreplace")
    draw_all(lines, runs, config.output_dir)
    print("\n".join(notes), file=sys.stderr)
    print(f"{len(runs)} runs on {len(lines)} lines: table and figures in {config.output_dir}")


def _below(path: str | Path, config: PlotsConfig) -> str:
    return Path(path).relative_to(config.logs).as_posix()


def runs_table(config: PlotsConfig, runs: Sequence[RunLog]) -> pd.DataFrame:
    """The table of all runs, with logs named as seen from their folder."""
    frame = table(runs, skip_steps=config.skip_steps)
    return frame.assign(log=[_below(log, config) for log in frame["log"]])


def results_csv(frame: pd.DataFrame) -> str:
    """All columns of all runs; means stand beside medians and quartiles."""
    return frame.round(6).to_csv(index=False, lineterminator="\n")


def in_ranks(text: str, frame: pd.DataFrame) -> str:
    """The text; where all runs were on CPUs, of ranks and not of GPUs."""
    return text.replace("GPU", "rank") if (frame["device_type"] == "cpu").all() else text


def results_table(frame: pd.DataFrame) -> str:
    """The table of runs for people, in the shape of the original's: how it ran, how it went."""
    rows = [_row(row) for row in study.rows_of(frame)]
    return in_ranks(told_tables({"runs": rows}), frame)


def _row(row: Any) -> str:
    ending = "yes" if row.status == "completed" else f"no: {row.status.replace('_', ' ')}"
    steps = f" ({row.first_step:.0f} to {row.last_step:.0f})" * (row.num_steps > 0)
    return told_row("runs", row=row, success=ending, steps=steps, ways=study.ways_of(row))


def table_notes(frame: pd.DataFrame, config: PlotsConfig) -> list[str]:
    """What a reader of the table must know, in sentences."""
    older = f"{SKIP_STEPS} ({SKIP_STEPS_LEGACY} in older logs)"
    skip = older if config.skip_steps is None else config.skip_steps
    notes = [f"averages are over the logged steps after step {skip}"]
    if by_folder := int((frame["fsdp_source"] != "log").sum()):
        notes.append(f"FSDP or not comes from the name of the folder for {by_folder} older logs")
    ratio = frame["mfu_pct"] / frame["mfu_pct_as_logged"]
    if len(wrong := ratio[(ratio - 1).abs() > MFU_TOLERANCE]):
        shown, other = "from the configuration", "as-logged"
        if config.mfu == "as-logged":
            shown, other = "as logged", "from-config"
        notes.append(
            f"in {len(wrong)} logs MFU is {wrong.min():.2f} to {wrong.max():.2f} times what they"
            " say (older logs counted the parameters of one rank's shard); figures show it"
            f" {shown}, and --mfu {other} the other"
        )
    if unknown := sorted(set(frame.loc[frame["peak_tflops"].isna(), "device"].dropna())):
        notes.append(f"MFU is n/a: no peak is known for {', '.join(unknown)}")
    for column in ("commit", "torch_version"):
        if len(names := sorted(set(frame[column].dropna()))) > 1:
            notes.append(f"several {column.replace('_', ' ')}s: {', '.join(names)}")
    return notes


def draw_all(lines: Sequence[study.Line], runs: Sequence[RunLog], folder: Path) -> None:
    """Draw and save every figure that has something to show."""
    looks = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    looks |= {"grid.alpha": 0.35, "svg.hashsalt": "plots"}
    sns.set_theme(context="notebook", style="ticks", font_scale=0.95, rc=looks)
    if any(run.breakdowns for run in runs):
        save(draw_breakdown(runs), folder / "breakdown")
    if not lines:
        return
    alone = {name: (name,) for name in LABELS}
    for file, names in {**alone, "training_metrics_comparison": FOUR}.items():
        height = 5.6 if len(names) == 1 else 3.6 * len(names)
        figure = plt.figure(figsize=(10, height), layout="constrained")
        grid = figure.add_gridspec(len(names), 1)
        for number, name in enumerate(names):
            draw_metric(grid[number], name, lines)
        finish(figure, lines, READINGS.get(file, READING))
        save(figure, folder / file)


def draw_metric(spec: Any, name: str, lines: Sequence[study.Line]) -> None:
    """One metric against model size, a panel for each strategy, over rows of crosses.

    Each configuration and variant that was out of memory has a row, the same in all panels.
    """
    own: dict[str, list[study.Line]] = {}
    for line in lines:
        own.setdefault(line.strategy, []).append(line)
    failed = [line for line in lines if (line.points["status"] == study.OUT_OF_MEMORY).any()]
    rows = list(dict.fromkeys((line.configuration, line.variant) for line in failed))
    heights = [1, 0.08 * len(rows)] if rows else [1]
    widths = [max(3, len(set(sizes_of(those)))) for those in own.values()]
    grid = spec.subgridspec(len(heights), len(own), height_ratios=heights, width_ratios=widths,
                            hspace=0, wspace=0.03)  # fmt: skip
    panels, *strips = grid.subplots(sharex="col", sharey="row", squeeze=False)
    for strip in (strip for row in strips for strip in row):
        strip.set(ylim=(len(rows) - 0.4, -0.6), yticks=[(len(rows) - 1) / 2])
        strip.set_yticklabels(["out of\nmemory"], fontsize=9)
        strip.tick_params(left=False)
        strip.grid(axis="y", visible=False)
    for number, those in enumerate(own.values()):
        draw_panel(panels[number], name, those, share=widths[number] / sum(widths))
        for line in (line for line in failed if line.strategy == those[0].strategy):
            row = rows.index((line.configuration, line.variant))
            draw_crosses(strips[0][number], line, row, rows)
        panels[number].tick_params(which="both", bottom=not rows, left=number == 0)
        (strips[0] if strips else panels)[number].set_xlabel("Parameters")
    values = pd.concat([line.points for line in lines])
    shown = values.loc[values["status"] != study.OUT_OF_MEMORY, name].dropna()
    scale_values(panels[0], shown, is_log=name == "tokens_per_sec")
    if name == "peak_memory":
        draw_limits(panels, values)
    panels[0].set_title(in_ranks(LABELS[name], values), loc="left", fontsize=13)


def draw_panel(axes: plt.Axes, name: str, lines: Sequence[study.Line], *, share: float) -> None:
    """The lines of one strategy; ``share``: of the width that one panel alone would have."""
    for line in lines:
        draw_line(axes, line, name)
    points = pd.concat([line.points for line in lines])
    trained = points["status"] != study.OUT_OF_MEMORY
    if trained.any() and points.loc[trained, name].isna().all():
        text = in_ranks(f"not drawn: {REASONS.get(name, 'not logged')}", points)
        axes.text(0.5, 0.5, textwrap.fill(text, max(20, int(52 * share))), ha="center",
                  transform=axes.transAxes, fontsize=9.5, color="0.35")  # fmt: skip
    scale_sizes(axes, sizes_of(lines), share)
    name_factors(axes, points, lines[0].strategy, share)


def sizes_of(lines: Sequence[study.Line]) -> list[int]:
    """Parameters of each point of some lines."""
    return [size for line in lines for size in line.points["num_parameters"]]


def draw_line(axes: plt.Axes, line: study.Line, name: str) -> None:
    """Points with their spread, joined; hollow where a run was cut short, n= where repeated."""
    is_drawn = line.points[name].notna() & (line.points["status"] != study.OUT_OF_MEMORY)
    points: Any = line.points[is_drawn]
    sizes, values = points["num_parameters"], points[name]
    spread = np.abs([values - points[f"{name}_low"], points[f"{name}_high"] - values])
    color, marker, dash = style(line)
    axes.errorbar(sizes, values, yerr=spread, color=color, linestyle=dash, capsize=3,
                  linewidth=1.8, elinewidth=1.4)  # fmt: skip
    faces = ["white" if cut else color for cut in points["cut_short"]]
    axes.scatter(sizes, values, 46, faces, marker=marker, edgecolors=[color], linewidths=1.6,
                 zorder=3)  # fmt: skip
    # Where lines lie on each other, so would their words: a height for each configuration.
    heights = (-15, -26, -37, -48) if name == "peak_memory" else (5, -15, 16, -26)
    height = heights[line.hue % 4]
    for row in study.rows_of(points):
        is_labelled = line.has_own_batches and name != "training_tokens_pct"
        batch = "batch " * (study.AS_LABELLED not in line.variant) + str(row.batch_size)
        words = [batch] * is_labelled + [f"n={row.n}"] * (row.n > 1)
        if words:
            axes.annotate(", ".join(words), (row.num_parameters, getattr(row, name)), (6, height),
                          textcoords="offset points", fontsize=9, color=color, zorder=4,
                          path_effects=[withStroke(linewidth=2.5, foreground="white")])  # fmt: skip


def draw_crosses(
    axes: plt.Axes, line: study.Line, height: float, rows: Sequence[tuple[str, str]]
) -> None:
    """The sizes at which a line's runs were out of memory, named; of several of a colour, which."""
    is_several = sum(name == line.configuration for name, _ in rows) > 1
    middle = np.sqrt(np.prod(axes.get_xlim())) if axes.get_xscale() == "log" else np.mean(
        axes.get_xlim())  # fmt: skip
    for row in study.rows_of(line.points[line.points["status"] == study.OUT_OF_MEMORY]):
        at, color = (row.num_parameters, height), style(line)[0]
        axes.plot(*at, "x", color=color, markersize=8, markeredgewidth=2.2)
        words = f"{row.strategy} {row.factor}"
        if line.has_own_batches:
            words += f", batch {row.batch_size}"
        elif is_several and line.variant:
            words += f", {line.variant}"
        is_left = row.num_parameters < middle
        axes.annotate(words, at, (8 if is_left else -8, 0), fontsize=8.5, color="0.35",
                      textcoords="offset points", ha="left" if is_left else "right",
                      va="center")  # fmt: skip


def style(line: study.Line) -> tuple[Any, Any, Any]:
    """(colour, marker, dash); after ten of each they begin anew."""
    palette = sns.color_palette("colorblind")
    return (palette[line.hue % len(palette)], MARKERS[line.shape % len(MARKERS)],
            DASHES[line.shape % len(DASHES)])  # fmt: skip


def scale_sizes(axes: plt.Axes, sizes: Any, share: float) -> None:
    """A log axis where sizes span decades; ticks are at sizes, where their labels have room."""
    sizes = np.unique(sizes).astype(float)
    is_log_x = sizes[-1] > 4 * sizes[0]
    axes.set_xscale("log" if is_log_x else "linear")
    at = np.log(sizes) if is_log_x else sizes
    shown = apart(at, 1 / max(1.9, MAX_TICKS * share))
    axes.set_xticks(sizes[shown], [size_label(size) for size in sizes[shown]])
    axes.set_xticks([], minor=True)
    margin = 0.06 / share * (at[-1] - at[0] or at[0])
    ends = np.array([at[0] - margin, at[-1] + margin])
    axes.set_xlim(*(np.exp(ends) if is_log_x else ends))


def apart(places: np.ndarray, share: float) -> list[int]:
    """Numbers of the places, from the first on, that are this share of all their width apart."""
    shown = [0]
    for number, place in enumerate(places):
        if place - places[shown[-1]] > share * (places[-1] - places[0]):
            shown.append(number)
    return shown


def scale_values(axes: plt.Axes, values: pd.Series, *, is_log: bool) -> None:
    """A log axis where values span decades; else one that begins at 0."""
    if values.empty:
        axes.set_yticks([])
        return
    if is_log and values.max() > 10 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def size_label(size: float) -> str:
    """A number of parameters with three digits: 75.5 M."""
    value, unit = next(((size / u, w) for u, w in UNITS if size >= 0.9995 * u), (size, ""))
    return f"{value:.3g} {unit}".rstrip()


def name_factors(axes: plt.Axes, points: pd.DataFrame, strategy: str, share: float) -> None:
    """Above the axes, the strategy and its factors."""
    sizes = points.drop_duplicates("num_parameters").sort_values("num_parameters")
    shown = sizes.iloc[apart(np.log(sizes["num_parameters"].to_numpy()), CLOSE / share)]
    top = axes.secondary_xaxis("top")
    top.set_xticks(shown["num_parameters"], shown["factor"], fontsize=9, color="0.35")
    top.set_xticks([], minor=True)
    top.tick_params(length=3, pad=1, color="0.35")
    top.set_xlabel(f"factor of {strategy}", fontsize=9, color="0.35", loc="right")
    top.spines["top"].set_visible(False)


def draw_limits(panels: Sequence[plt.Axes], points: pd.DataFrame) -> None:
    """The memory of each device as a line, where the logs say how much it has."""
    devices: Any = points.groupby("device")
    for device, gib in devices["device_memory_gib"].max().dropna().items():
        panels[0].set_ylim(top=max(panels[0].get_ylim()[1], 1.12 * gib))
        for axes in panels:
            axes.axhline(gib, color="0.25", linestyle="--", linewidth=1.4)
        panels[0].annotate(f"{device}: {gib:.0f} GiB", (0.01, gib), (0, 4), fontsize=9.5,
                      xycoords=("axes fraction", "data"), textcoords="offset points")  # fmt: skip


def finish(figure: plt.Figure, lines: Sequence[study.Line], reading: str) -> None:
    """Legend (colours, then markers), and a caption of what all runs share."""
    figure.legend(handles=entries(lines), loc="outside upper left", ncols=NUM_COLUMNS,
                  frameon=False, fontsize=10)  # fmt: skip
    points = pd.concat([line.points for line in lines])
    own = [study.settings_of(row) for row in study.rows_of(points)]
    add_caption(figure, own, in_ranks(reading, points))


def entries(lines: Sequence[study.Line]) -> list[Line2D]:
    """Entries of the legend, of two lines at most."""
    colors = {line.configuration: style(line)[0] for line in lines}
    handles = [Line2D([], [], color=c, linewidth=4, label=name) for name, c in colors.items()]
    if len(shapes := {line.variant: style(line)[1:] for line in lines}) > 1:
        handles += [
            Line2D([], [], color="0.3", marker=marker, linestyle=dash,
                   label=textwrap.fill(variant or "otherwise", COLUMN_CHARS, max_lines=2,
                                       placeholder=" …"))
            for variant, (marker, dash) in list(shapes.items())[:MAX_VARIANTS]
        ]  # fmt: skip
    if len(shapes) > MAX_VARIANTS:
        text = f"and {len(shapes) - MAX_VARIANTS} others: too many;\ngive --logs one study"
        handles.append(Line2D([], [], linestyle="", label=text))
    points = pd.concat([line.points for line in lines])
    marks = {"x": ("out of memory", (points["status"] == study.OUT_OF_MEMORY).any()),
             "o": ("cut short (killed, failed …)", points["cut_short"].any())}  # fmt: skip
    return handles + [
        Line2D([], [], color="0.3", marker=mark, linestyle="", label=text,
               markerfacecolor="white", markeredgewidth=1.8)
        for mark, (text, seen) in marks.items() if seen
    ]  # fmt: skip


def add_caption(figure: plt.Figure, own: Sequence[dict[str, Any]], reading: str) -> None:
    """Below the figure: the settings that all runs share, and how it is to be read."""
    shared = {f: {one[f] for one in own} - {None} for f in CAPTION_FIELDS}
    known = {field: values.pop() for field, values in shared.items() if len(values) == 1}
    facts = "; ".join(study.variant_of(known, [field]) for field in known)
    caption = ". ".join(filter(None, [facts, reading]))
    caption = textwrap.fill(caption, 120, break_on_hyphens=False)
    figure.text(0.01, 0.01, caption, fontsize=9, color="0.35")
    bottom = (0.15 + 0.16 * len(caption.splitlines())) / figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, bottom, 1, 1 - bottom))


def draw_breakdown(runs: Sequence[RunLog]) -> plt.Figure:
    """A bar per profiled run, of the shares of a step; beside it its kernels and its MFU."""
    rows = study.profiled_runs(runs)
    figure, axes = plt.subplots(figsize=(10, 2.2 + 0.5 * len(rows)), layout="constrained")
    axes.set(xlim=(0, 100), xlabel="Share of a step (%)", yticks=range(len(rows)))
    axes.set_title("Where the time of a step goes", loc="left", fontsize=13)
    colors = [*sns.color_palette("colorblind", len(KINDS) - 1), "0.88"]
    names = [study.configuration_of(row) for row, _ in rows]
    own = [study.settings_of(row) for row, _ in rows]
    telling = [field for field in study.telling_settings(own, names) if field != "strategy"]
    shares = [shares_of_step(run.breakdowns[-1], study.quiet_step_s(run)) for _, run in rows]
    left, labels = np.zeros(len(rows)), []
    for kind, color in zip(KINDS, colors, strict=True):
        widths = np.array([100 * of_step[kind] for of_step in shares])
        bars = axes.barh(range(len(rows)), widths, 0.72, left, color=color,
                         label=kind if widths.any() else "_")  # fmt: skip
        texts = [f"{width:.0f}" if width > 3.5 else "" for width in widths]
        ink = "black" if kind in ("copies", IDLE) else "white"
        axes.bar_label(bars, texts, label_type="center", color=ink, fontsize=10)
        left += widths
    for place, (row, run) in enumerate(rows):
        variant = study.variant_of(own[place], telling)
        words = (f"{row.strategy} {row.factor}", names[place], variant)
        labels.append("\n".join(textwrap.wrap(", ".join(filter(None, words)), 34)))
        notes = [f"{run.breakdowns[-1]['num_kernels_per_step']:,.0f} kernels"]
        if (step_s := study.quiet_step_s(run)) and not pd.isna(row.peak_tflops):
            flops = row.flops_per_token * row.global_batch * row.sequence_length / row.gpus
            notes.insert(0, f"MFU {100 * flops / step_s / 1e12 / row.peak_tflops:.0f} %")
        axes.text(101, place, "\n".join(notes), va="center", fontsize=9.5)
    axes.set_yticklabels(labels)
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=10)
    add_caption(figure, own, "Idle: no kernel runs, log lines included.")
    return figure


def save(figure: plt.Figure, path: Path) -> None:
    """As PNG and SVG, whose bytes depend on the data only."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:  # the layout is solved up to a last digit that varies
        axes.set_position(tuple(np.round(axes.get_position().bounds, 4)))
    figure.savefig(path.with_suffix(".png"), dpi=160, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    matplotlib.use("agg")
    settings_of_user = parse_flags(PlotsConfig)
    try:
        main(settings_of_user)
    except ValueError as error:
        refuse(error)
    except OSError as error:
        refuse(f"{settings_of_user.output_dir}: {error.strerror}")
