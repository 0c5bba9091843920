"""Two loss curves, and their difference at each step with what it is held against."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

import parity

# Told apart with any colour vision (Okabe and Ito).
FSDP_COLOR, REFERENCE_COLOR, MARK_COLOR = "#D55E00", "#0072B2", "#222222"


def plot_comparison(comparison: parity.Comparison, path: Path, what: str = "") -> None:
    """Both loss curves, and under them their difference per step with the floor as a band.

    ``what`` was run stands in the title.
    """
    gaps = comparison.losses
    steps, differences, floors = (
        np.array([getattr(gap, name) for gap in gaps]) for name in ("step", "difference", "floor")
    )
    limits = parity.FACTOR * floors
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")

    def label(axes: Axes, text: str, height: float, *, color: str, offset: int = 0) -> None:
        axes.annotate(text, (steps[-1], height), (8, offset), color=color, va="center",
                      textcoords="offset points", annotation_clip=False)  # fmt: skip

    sides = (("no FSDP", REFERENCE_COLOR, "reference", 5), ("FSDP", FSDP_COLOR, "fsdp", 1.6))
    for name, color, side, width in sides:
        losses = [getattr(gap, side) for gap in gaps]
        top.plot(steps, losses, ".-", color=color, linewidth=width, alpha=0.5 if width > 2 else 1)
        last = next((loss for loss in reversed(losses) if np.isfinite(loss)), 0.0)
        label(top, name, last, color=color, offset=22 if width > 2 else 6)
    top.set_title(f"{what}\n{headline(comparison)}".lstrip(), loc="left", fontsize=13)
    top.set_ylabel("Loss")
    # A log axis has no zero: such differences stand on the bottom edge; infinite ones at the top.
    seen = np.concatenate([differences[(differences > 0) & np.isfinite(differences)], floors])
    low, high = seen.min() / 4, max(seen.max(), limits.max()) * 4
    zero, heights = differences == 0, np.clip(differences, low, high)
    bottom.fill_between(steps, low, floors, color=REFERENCE_COLOR, alpha=0.2, linewidth=0)
    bottom.plot(steps, limits, "--", color=REFERENCE_COLOR, linewidth=1.2)
    text = f"{parity.FACTOR:g} × floor:\nthe limit"
    label(bottom, text, limits[-1], color=REFERENCE_COLOR)
    name = "floor:\n" + comparison.floor_name.replace(" re", "\nre")
    label(bottom, name, floors[-1], color=REFERENCE_COLOR, offset=-22)
    bottom.vlines(steps, low, heights, color=MARK_COLOR, linewidth=0.8)
    colors = np.where(zero, "white", np.where(differences > limits, FSDP_COLOR, MARK_COLOR))
    bottom.scatter(steps, heights, 25, colors, edgecolors=MARK_COLOR, clip_on=False, zorder=3)
    ends = f" (○ no difference: {zero.sum()} of {len(steps)} steps)" if zero.any() else ""
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set(yscale="log", ylim=(low, high), xlabel=f"Step{ends}", ylabel="|Loss difference|")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def headline(comparison: parity.Comparison) -> str:
    """What the figure shows, in a sentence."""
    gap = parity.largest(comparison.losses)
    finding = f"Largest loss difference {gap.difference:.2g} at {gap.where}: "
    if comparison.verdict == "cannot tell":
        return finding + f"cannot tell\n({comparison.reason})"
    others = {"grad norm": comparison.grad_norms, "final weights": comparison.weights}
    outside = [k for k, gaps in others.items() if gaps and parity.worst(gaps).ratio > parity.FACTOR]
    inside = parity.worst(comparison.losses).ratio <= parity.FACTOR
    limit = f"{parity.FACTOR:g} × the {comparison.floor_name}"
    finding += f"{'inside' if inside else 'outside'} {limit}"
    but = f"\n(but the runs are not equal, by the {' and the '.join(outside)})"
    return finding + but * (inside and bool(outside))
