"""Is FSDP correct? Compares the job logs of the same training with and without FSDP.

    python loss_ablation.py --fsdp-logs A.out --no-fsdp-logs B.out [C.out D.out]

Prints what was compared, the largest loss difference, mean metrics, grad norms, final weights and
the verdict; draws ``loss_comparison.png``. Exit status: 0 equal, 1 not equal, 2 not comparable (or
bad input), 4 cannot tell. How it judges: parity.py.
"""

import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tyro

import parity
from analysis import MFU_TOLERANCE, SKIP_STEPS, SKIP_STEPS_LEGACY, mean_metrics
from cli import parse_flags, refuse
from loss_figure import plot_comparison
from run_log import RunLog, read_run

METRICS = {
    "tokens_per_sec": "tokens_per_s",
    "training_tokens_pct": "training_tokens_pct",
    "mfu": "mfu_pct_as_logged",
    "tflops": "tflops_as_logged",
}
Runs = Sequence[RunLog]
Logs = tyro.conf.UseAppendAction[tuple[tuple[Path, ...], ...]]


@dataclasses.dataclass(frozen=True)
class AblationConfig:
    """Compare the losses of runs with and without FSDP, from their job logs."""

    fsdp_logs: Logs
    """Job log of the run with FSDP; several: repeats, of which the farthest counts."""
    no_fsdp_logs: Logs
    """Job logs without FSDP; three or more that differ in micro-batches measure the noise."""
    output_dir: Path = Path("plots")
    """Folder of the figure."""


def main(config: AblationConfig) -> int:
    """Print the comparison, draw the figure, return the exit status. ValueError for bad logs."""
    fsdp, references = (
        [read_run(path) for group in groups for path in group]
        for groups in (config.fsdp_logs, config.no_fsdp_logs)
    )
    if not fsdp or not references:
        raise ValueError("give at least one log to --fsdp-logs and one to --no-fsdp-logs")
    for run, expected in (*((run, True) for run in fsdp), *((run, False) for run in references)):
        if run.run is not None and run.run.get("fsdp", expected) != expected:
            raise ValueError(f"{run.path} was trained with{'out' * expected} FSDP: wrong flag?")
    comparison = parity.compare(fsdp, references)
    if not comparison.losses and not comparison.mismatches:
        raise ValueError(comparison.reason)
    for section in (describe_runs, describe_losses, describe_metrics, describe_rest):
        print("\n".join(section(fsdp, references, comparison)), end="\n\n")
    if comparison.losses and not comparison.mismatches:
        path = config.output_dir / "loss_comparison.png"
        try:
            plot_comparison(comparison, path)
            print(f"Figure: {path}")
        except OSError as error:  # the verdict stands without its picture
            print(f"no figure: {path}: {error.strerror}", file=sys.stderr)
    weak = comparison.moved_share is not None and comparison.moved_share < parity.MIN_MOVED_SHARE
    provisos = [f"{100 * (comparison.moved_share or 0):.0f} % of the weights moved"] * weak
    if comparison.num_sharp < len(comparison.losses):
        provisos.append(f"the floor is narrow at {comparison.num_sharp} steps")
    proviso = f" (but only {', and '.join(provisos)})" if provisos else ""
    print(f"Verdict: {comparison.verdict.upper()}: {comparison.reason}{proviso}")
    return comparison.exit_status


def describe_runs(fsdp: Runs, references: Runs, comparison: parity.Comparison) -> Iterator[str]:
    """Both sides' Run records side by side; what forbids to compare them is marked."""
    yield "=== Compared Runs ==="
    rows = [("log", [[run.path.name for run in side] for side in (fsdp, references)], "")]
    for place in f"{parity.OTHER_FIELDS} {parity.PARITY_FIELDS}".split():
        values = [[parity.field_of(run, place) for run in side] for side in (fsdp, references)]
        known = {str(value) for side in values for value in side if value is not None}
        must_not = place in parity.PARITY_FIELDS.split() and len(known) > 1
        mark = "  <-- must not differ" * must_not
        if known and (place != "model" or mark):
            rows.append((parity.label_of(place), values, mark))
    for label, sides, mark in (("", [["FSDP"], ["NO FSDP"]], ""), *rows):
        texts = [", ".join(dict.fromkeys("-" if v is None else str(v) for v in s)) for s in sides]
        yield f"{label:<26}{texts[0]:<42} {texts[1]}{mark}"
    yield from comparison.notes
    for run in (*fsdp, *references):
        if run.num_skipped_lines or run.num_duplicate_steps:
            yield (
                f"note: {run.path.name}: {run.num_skipped_lines} damaged lines skipped, "
                f"{run.num_duplicate_steps} repeated steps (the last counts)"
            )


def describe_losses(fsdp: Runs, references: Runs, comparison: parity.Comparison) -> Iterator[str]:
    """The common step at which the losses differ most."""
    yield "=== Max Loss Difference ==="
    if not comparison.losses:
        yield "no step in common"
        return
    gap = parity.largest(comparison.losses)
    form = f".{max(4, comparison.decimals)}f"
    yield f"Step: {gap.step}"
    yield f"Log FSDP Loss: {gap.fsdp:{form}}"
    yield f"Log NO FSDP Loss: {gap.reference:{form}}"
    yield f"Absolute Difference: {gap.difference:{form}}"


def describe_metrics(fsdp: Runs, references: Runs, comparison: parity.Comparison) -> Iterator[str]:
    """Mean speed of both sides: over all logged steps, then over the common ones after warm-up."""
    yield "=== Mean Metrics ==="
    tables = {"all logged steps": {step.step for run in (*fsdp, *references) for step in run.steps}}
    legacy = any(run.run is None for run in (*fsdp, *references))
    warm_up = SKIP_STEPS_LEGACY if legacy else SKIP_STEPS
    if common := {gap.step for gap in comparison.losses if gap.step > warm_up}:
        tables[f"{len(common)} common steps, {min(common)} to {max(common)}"] = common
    for title, steps in tables.items():
        sides = [_mean_metrics(side, steps) for side in (fsdp, references)]
        yield f"{title:<28}{'FSDP':>12}{'NO FSDP':>12}"
        for label, name in METRICS.items():
            texts = ("n/a" if side[name] is None else f"{side[name]:.2f}" for side in sides)
            yield f"{label + ':':<28}" + "".join(f"{text:>12}" for text in texts)
        for label, side in zip(("FSDP", "NO FSDP"), sides, strict=True):
            logged, right = side["mfu_pct_as_logged"], side["mfu_pct"]
            if logged and right and abs(right / logged - 1) > MFU_TOLERANCE:
                yield (
                    f"note: {label}: the logged MFU {logged:.2f} counts the parameters of one "
                    f"rank's shard; from the configuration it is {right:.2f} "
                    f"({side['tflops']:.2f} TFLOPs)"
                )
    if not common:
        yield f"no common step after step {warm_up} (warm-up)"
    sizes = {run.run["config"].get("batch_size") for run in (*fsdp, *references) if run.run}
    if len(sizes) > 1:
        yield "note: micro-batches differ, so this is not what FSDP costs (plots.py tells that)"


def _mean_metrics(runs: Runs, steps: set[int]) -> dict[str, float | None]:
    """Each metric's mean over some steps and the repeats of a run; None where one has none."""
    metrics = []
    for run in runs:
        kept = [step for step in run.steps if step.step in steps]
        metrics.append(vars(mean_metrics(dataclasses.replace(run, steps=kept), skip_steps=0)))
    columns = {name: [one[name] for one in metrics] for name in metrics[0]}
    return {k: None if None in column else float(np.mean(column)) for k, column in columns.items()}


def describe_rest(fsdp: Runs, references: Runs, comparison: parity.Comparison) -> Iterator[str]:
    """Grad norms and final weights: AdamW hides a wrong gradient scale from the losses."""
    yield "=== Grad Norm and Final Weights ==="
    norms, weights = comparison.grad_norms, comparison.weights
    for name, gaps in {"grad norms": norms, "final weights": weights}.items():
        if not gaps:
            yield f"{name}: not in all logs (after the same number of steps)"
    for gaps in filter(None, (norms, weights[:1], weights[1:])):
        gap = parity.worst(gaps)
        name = "grad norm" if gaps is norms else "weights"
        yield (
            f"{name}, most floors wide at {gap.where}: relative difference {gap.difference:.2e}, "
            f"{gap.ratio:.3g} × its floor {gap.floor:.2e} ({gap.fsdp:.6f} against "
            f"{gap.reference:.6f})"
        )
    if comparison.moved_share is not None:
        yield f"weights that moved at all: {100 * comparison.moved_share:.1f} %"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader of the output may leave
    try:
        status = main(parse_flags(AblationConfig))
    except ValueError as error:
        refuse(error)
    sys.exit(status)
