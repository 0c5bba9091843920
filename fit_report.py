"""What do the logs of the fitting experiment say: tables for README.md, and the figure.

Read from a folder that benchmarks/what_fits.py wrote. Every probe's record holds what the memory
model predicted beside what was measured.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import seaborn as sns
from matplotlib import pyplot as plt

import memory
from analysis import NUM_BYTES, RunFacts, facts, find_logs, load_published, load_runs
from memory import GIB, ActivationCheckpointing, Setup, predict
from model_config import TransformerConfig, build_config, count_params
from run_log import RunLog, blaming, read_run
from tables import told, told_row

# Smaller peaks are mostly what every process has.
MIN_PEAK_GIB = 10.0
GPUS = (1, 2, 4, 8, 16, 32, 64)
MODES = get_args(ActivationCheckpointing)
EARLIER_WALL = 14  # the largest `all` factor that the earlier experiment trained on any GPUs
WHAT = ("scaling_strategy", "factor", "activation_checkpointing", "compile")
STATE_BYTES = 8  # per parameter: bf16 parameter, gradient and two moments


def read_searches(folder: Path) -> list[RunLog]:
    """Logs with probes, by name."""
    return [run for path in find_logs(folder) if (run := read_run(path)).probes]


def _is_single(run: RunLog) -> bool:
    """Whether it tries one size only, to hold the prediction against a peak."""
    config = (run.run or {})["config"]
    return config["low"] == config["high"]


def best_probe(run: RunLog) -> dict[str, Any] | None:
    """The largest probe that fits, None without one."""
    fitting = [probe for probe in run.probes if probe["fits"]]
    return max(fitting, key=lambda probe: probe["factor"], default=None)


def search_rows(folder: Path) -> list[str]:
    """A row per search on one device: what fits, how far off the prediction was, and the proof.

    The proof is the log of five steps of train.py at the answer, ``steps_…`` beside ``train_…``.
    """
    rows = []
    for run in read_searches(folder):
        with blaming(run.path):
            config, best = (run.run or {})["config"], best_probe(run)
            if not (run.run or {})["simulated"] and not _is_single(run) and best:
                rows.append(_search_row(run, config, best))
    return rows


def _search_row(run: RunLog, config: dict[str, Any], best: dict[str, Any]) -> str:
    limit, is_train = config["memory_limit_gib"], config["mode"] == "train"
    proof = run.path.with_name(run.path.name.replace("train_", "steps_"))
    steps = read_run(proof) if is_train and proof.is_file() else None
    return told_row(
        "fits: searches", best=best, at_least="at least " * (best["factor"] == config["high"]),
        checkpointing=best["activation_checkpointing"] * is_train, error=error_pct(best),
        limit="none" if limit is None else f"{limit:g}", num_probes=len(run.probes),
        seconds=(run.end or {})["seconds"]["total"], log=run.path.name,
        proof=f"{len(steps.steps)} steps, {steps.status}" if steps else "",
    )  # fmt: skip


def error_pct(probe: dict[str, Any]) -> float:
    """By how much the predicted peak is off the measured one."""
    return 100 * (probe["predicted_gib"] / probe["peak_gib"] - 1)


def error_rows(folder: Path) -> list[str]:
    """A row per model that was trained on one device: the error of the memory model."""
    rows = {}
    for run in read_searches(folder):
        with blaming(run.path):
            batch = (run.run or {})["config"]["batch_size"]
            for probe in run.probes:
                large = probe["fits"] and probe["peak_gib"] > MIN_PEAK_GIB
                if large and probe["mode"] == "train" and not probe["simulated"]:
                    place = (*(probe[name] for name in WHAT), batch)
                    rows[place] = told_row(
                        "fits: errors", best=probe, batch_size=batch, error=error_pct(probe)
                    )
    return [rows[place] for place in sorted(rows)]


def best_factors(folder: Path) -> dict[str, Any]:
    """The largest `all` that one device loads and trains, and that several, or simulated ranks, do.

    In all of its memory; simulated, with full checkpointing, and with the room that the memory
    model leaves, also for NCCL. Empty where one was not searched for.
    """
    found: dict[str, dict[int, tuple[int, int]]] = {"load": {}, "train": {}, "simulated": {}}
    device: dict[str, Any] = {}
    for run in read_searches(folder):
        with blaming(run.path):
            best, record = best_probe(run), run.run or {}
            if best is None or _is_single(run) or record["config"]["memory_limit_gib"] is not None:
                continue
            kind = "simulated" if best["simulated"] else best["mode"]
            is_full = best["activation_checkpointing"] == "full"
            if best["scaling_strategy"] == "all" and (is_full or kind != "simulated"):
                gpus, size = best["world_size"], (best["factor"], best["num_parameters"])
                if best["simulated"]:
                    size = min(size, _planned(best, record["device_gib"]))
                found[kind][gpus] = max(size, found[kind].get(gpus, size))
                device = {name: record[name] for name in ("device", "device_gib")}
    if not (found["load"] and found["train"]):
        return {}
    limits = [facts(run) for run in measured_limits(folder)]
    real = [each for each in limits if each.strategy == "all"]
    real = {each.gpus: each for each in real if each.activation_checkpointing == "full"}
    words = [told("answers: fits several", what=each) for each in real.values()]
    if simulated := sorted((n, size) for n, size in found["simulated"].items() if n not in real):
        words.append(told(
            "answers: fits simulated", gpus=", ".join(str(gpus) for gpus, _ in simulated),
            factors=", ".join(str(size[0]) for _, size in simulated),
            sizes=", ".join(f"{size[1] / 1e9:.0f}" for _, size in simulated)))  # fmt: skip
    return {
        "load": found["load"][1][0], "load_parameters": found["load"][1][1],
        "train": found["train"][1], **device, "several": " ".join(words),
    }  # fmt: skip


def _planned(probe: dict[str, Any], device_gib: float) -> tuple[int, int]:
    """(factor, parameters) of the largest model that the memory model lets train as a probe did."""
    config = memory.FitConfig(device_gib, scaling_strategy=probe["scaling_strategy"])
    like = memory.setup_of(config, probe["world_size"], False, probe["activation_checkpointing"])
    factor, setup = memory.largest_of(config, like)
    return factor, count_params(setup.config)


def training_errors(folder: Path) -> tuple[list[float], list[float]]:
    """Errors of the memory model in percent, of each completed training that peaked high enough.

    Of what was allocated at the peak; and of what was reserved, where the device had room for it.
    """
    allocated, reserved = [], []
    for run in load_published(folder):
        with blaming(run.path):
            end, record = run.end or {}, run.runs[-1]
            peak_gib = end.get("peak_gib")
            if run.status == "completed" and peak_gib and peak_gib > MIN_PEAK_GIB:
                setup = setup_of_run(run)
                allocated.append(100 * (predict(setup).allocated / GIB / peak_gib - 1))
                reserved_gib = end.get("peak_reserved_gib") or 0
                has_room = memory.full_speed(setup) <= (record.get("device_memory_gib") or 0) * GIB
                if has_room and reserved_gib > 0:
                    predicted_gib = memory.reserved_with_room(setup) / GIB
                    reserved.append(100 * (predicted_gib / reserved_gib - 1))
    return allocated, reserved


def setup_of_run(run: RunLog) -> Setup:
    """What a training was, to the memory model; of one that was resumed, its last part."""
    what, flags = facts(replace(run, runs=run.runs[-1:])), run.runs[-1]["config"]
    return Setup(
        TransformerConfig(**run.runs[-1]["model"]), what.sequence_length, what.batch_size,
        what.grad_accumulation_steps, NUM_BYTES[str(what.model_dtype)],
        NUM_BYTES[str(what.compute_dtype)], flags["activation_checkpointing"], flags["compile"],
        what.fsdp, what.gpus // what.replicas, what.replicas,
        flags.get("cpu_offload", False), flags.get("reshard_after_forward", True),
        run.runs[-1].get("gradients_exchanged", False),
    )  # fmt: skip


def measured_limits(folder: Path) -> list[RunLog]:
    """The largest that trained on several GPUs, where the next size was out of memory.

    Of the runs of one row by default in the study beside the folder (``scaling``), for each number
    of GPUs, strategy and checkpointing mode whose limit was found. Raises ValueError where these
    are of several devices, or versions of torch.
    """
    ended: dict[tuple, dict[str, dict[int, RunLog]]] = {}
    for run in load_runs(folder.with_name("scaling"))[0]:
        with blaming(run.path):
            what, flags = facts(run), run.runs[-1]["config"]
            mode, usual = what.activation_checkpointing, not (what.launched or flags.get("profile"))
            if what.gpus > 1 and mode in MODES and usual and setup_of_run(run) == _by_default(what):
                way = what.gpus, what.strategy, mode, str(what.device), str(what.torch_version)
                by_factor = ended.setdefault(way, {}).setdefault(run.status, {})
                by_factor.setdefault(what.factor, run)
    limits = {}
    for way, runs in sorted(ended.items()):
        trained, failed = (runs.get(status, {}) for status in ("completed", "out_of_memory"))
        if (largest := max(trained, default=0)) and largest + 1 in failed:
            limits[way] = trained[largest]
    if len({way[3:] for way in limits}) > 1:
        names = ", ".join(run.path.name for run in limits.values())
        raise ValueError(f"limits of several devices or versions of torch: {names}")
    return list(limits.values())


def _by_default(what: RunFacts) -> Setup:
    """A run of this size, checkpointing and number of GPUs by default, at one row."""
    strategy, mode = what.strategy, what.activation_checkpointing
    config = build_config(strategy, what.factor, memory.MODEL_VOCAB_SIZE)  # pyright: ignore
    like = memory.setup_of(memory.FitConfig(1), what.gpus, False, mode)  # pyright: ignore
    return replace(like, config=config)


def measured_rows(folder: Path) -> list[str]:
    """A row for each of `measured_limits`."""
    rows = []
    for run in measured_limits(folder):
        with blaming(run.path):
            predicted_gib = predict(setup_of_run(run)).allocated / GIB
            best = {**(run.end or {}), "predicted_gib": predicted_gib}
            what = {"what": facts(run), "failed": facts(run).factor + 1, "log": run.path.name}
            rows.append(told_row("fits: measured", best=best, error=error_pct(best), **what))
    return rows


def simulated_rows(folder: Path) -> list[str]:
    """A row per simulated search, by GPUs."""
    rows = []
    for run in read_searches(folder):
        with blaming(run.path):
            if (best := best_probe(run)) and best["simulated"]:
                planned, _ = _planned(best, (run.run or {})["device_gib"])
                what = {"best": best, "error": error_pct(best), "planned": planned}
                row = told_row("fits: simulated", **what)
                rows.append((best["world_size"], best["factor"], row))
    return [row for _, _, row in sorted(rows)]


def plot_what_fits(folder: Path, path: Path) -> None:
    """Largest trainable `all` model against GPUs: predicted lines, points that were run."""
    sns.set_theme(style="whitegrid", palette="colorblind")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    runs = read_searches(folder)
    device_gib = max((run.run or {})["device_gib"] for run in runs)
    config = memory.FitConfig(gpu_memory_gib=device_gib)
    for mode in MODES:
        setups = (
            memory.largest_of(config, memory.setup_of(config, gpus, False, mode))[1]
            for gpus in GPUS
        )
        sizes = [count_params(setup.config) for setup in setups]
        axes.plot(GPUS, sizes, label=f"{'no' if mode == 'none' else mode} checkpointing")
    ideal = [gpus * device_gib * GIB / STATE_BYTES for gpus in GPUS]
    axes.plot(GPUS, ideal, "--", color="gray", label=f"ideal: {STATE_BYTES} bytes a parameter")
    searches = (run for run in runs if not _is_single(run))
    tried = [best for run in searches if (best := best_probe(run)) and best["mode"] == "train"]
    tried = [best for best in tried if best["scaling_strategy"] == "all"]
    real = [facts(run) for run in measured_limits(folder)]
    several = {(what.gpus, what.num_parameters) for what in real if what.strategy == "all"}
    for simulated, label in ((False, "tried"), (True, "tried, ranks simulated (no NCCL)")):
        points = {(best["world_size"], best["num_parameters"]) for best in tried
                  if best["simulated"] == simulated}  # fmt: skip
        if points := points - several if simulated else points | several:
            fill = "white" if simulated else "black"
            axes.plot(*zip(*sorted(points), strict=True), "o", color="black", label=label,
                      markerfacecolor=fill, zorder=3)  # fmt: skip
    wall = count_params(build_config("all", EARLIER_WALL, memory.MODEL_VOCAB_SIZE))
    axes.axhline(wall, color="firebrick", linewidth=1)
    reason = f"the original study (94.5 GiB a GPU) went no further than “all” {EARLIER_WALL}, on up"
    reason += "\nto 16 GPUs: it kept all activations, which more GPUs do not divide"
    axes.annotate(reason, (GPUS[-1], wall), (0, -4), textcoords="offset points", ha="right",
                  va="top", color="firebrick", fontsize=9)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="Parameters of the largest model")
    axes.set_title("The largest model “all” that trains (bf16, AdamW, a row of 4096 tokens a GPU)")
    axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS], minor=False)
    axes.legend(title=f"{device_gib:.0f} GiB a GPU; lines predicted")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
