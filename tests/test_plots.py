"""Do table and figures show what the logs say, and do runs that differ stay on lines apart?"""

import copy
import csv
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib import pyplot as plt

import plots
from analysis import load_runs, table
from breakdown import KINDS
from hardware import exchanges_gradients, is_graphed_by_default
from model_config import build_config, flops_per_token
from plots import FOUR, LABELS, PlotsConfig, main, results_csv, runs_table
from run_log import LogWriter, StepRecord, format_step, read_run
from study import drawn_points, quiet_step_s, split_lines

ROOT = Path(__file__).resolve().parent.parent
SEED_LOGS = ROOT.parent / "shared" / "seed_logs"
needs_seed_logs = pytest.mark.skipif(not SEED_LOGS.is_dir(), reason="older logs are not public")
UNPROFILED = [*LABELS, "training_metrics_comparison"]
FIGURES = [*UNPROFILED, "breakdown"]
FLAGS = {
    "scaling_strategy": "all", "scaling_factor": 2, "batch_size": 1, "grad_accumulation_steps": 1,
    "sequence_length": 4096, "model_dtype": "bf16", "activation_checkpointing": "none",
    "compile": True, "packing": True, "profile": False, "cuda_graph": "auto",
}  # fmt: skip
RECORD: dict[str, Any] = {
    "schema": 1, "script": "train.py", "config": FLAGS, "fsdp": False, "commit": "abc",
    "dirty": False, "versions": {"torch": "2.11"}, "device": "NVIDIA H200",
    "device_memory_gib": 139.8, "compute_dtype": "bfloat16", "peak_tflops": 989.0,
    "world_size": 1, "num_nodes": 1, "replicas": 1, "global_batch": 1,
}  # fmt: skip
SHARDED = {"fsdp": True, "script": "train_fsdp.py"}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a log under tmp_path/logs: tokens/s of steps 5, 10, …, and what its records change."""
    numbers = itertools.count()

    def write_log(
        speeds: list[float], *, status: str | None = "completed", name: str = "", factor: int = 2,
        flags: dict[str, Any] | None = None, breakdown: dict[str, Any] | None = None, **changes: Any
    ) -> Path:  # fmt: skip
        path = tmp_path / "logs" / (name or f"{next(numbers)}.out")
        record = copy.deepcopy(RECORD) | changes
        record["config"] |= {"scaling_factor": factor} | (flags or {})
        strategy = record["config"]["scaling_strategy"]
        shape = build_config(strategy, factor, 131_072)
        record["model"] = asdict(shape)
        own = record["config"]
        flops = flops_per_token(shape, own["sequence_length"]) * own["sequence_length"]
        default = record.get("device_type") != "cpu" and is_graphed_by_default(
            flops * (own["batch_size"] or 1), fsdp=record["fsdp"], compiled=own["compile"],
            replicas=record["replicas"], cpu_offload=own.get("cpu_offload", False),
        )  # fmt: skip
        asked = {"on": True, "off": False}.get(own["cuda_graph"], default)
        record.setdefault("cuda_graph", asked)
        record.setdefault("gradients_exchanged", record["fsdp"] and exchanges_gradients(
            record["world_size"], replicas=record["replicas"], nodes=record["num_nodes"],
            num_bytes=(2 if own["model_dtype"] == "bf16" else 4, 2)))  # fmt: skip
        log = LogWriter(path)
        log.record("Run", record)
        for number, speed in enumerate(speeds, start=1):
            seconds = 4096 / speed if speed else None
            log.step(StepRecord(5 * number, 11.0, speed, 99.0, 1.0, 2.0, peak_gib=60.0,
                                peak_reserved_gib=66.0, step_s=seconds))  # fmt: skip
            if breakdown and breakdown["first_step"] + breakdown["num_steps"] - 1 <= 5 * number:
                log.record("Breakdown", breakdown)
                breakdown = None
        if status:
            log.record("End", {"status": status})
        log.close()
        return path

    return write_log


def lines_of(
    folder: Path, mfu: str = "from-config"
) -> tuple[dict[tuple[str, str], Any], list[str]]:
    """Lines by (configuration, variant), and what is left out."""
    config = PlotsConfig(logs=folder)
    runs, _ = load_runs(folder)
    points, left_out = drawn_points(runs_table(config, runs), mfu)
    lines = split_lines(points)
    several = len({line.strategy for line in lines}) > 1
    found = {}
    for line in lines:
        words = filter(None, [f"strategy {line.strategy}" * several, line.variant])
        found[line.configuration, ", ".join(words)] = line
    assert len(found) == len(lines)
    assert sum(len(line.points) for line in lines) == len(points)
    return found, left_out


def run(*flags: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "plots.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout, done.stderr


@needs_seed_logs
def test_the_older_logs(tmp_path: Path) -> None:
    """The real command: means as expected in the table, every figure, and what cannot be used."""
    code, out, err = run("--logs", str(SEED_LOGS), "--output-dir", str(tmp_path))
    assert code == 0, err
    assert "21 runs" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["results.csv", "results.md", *(f"{f}.{end}" for f in UNPROFILED for end in ("png", "svg"))]
    )
    found = {
        row["log"]: row
        for row in csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    }
    text = (tmp_path / "results.md").read_text()
    columns = {
        "tokens_per_s": "tokens_per_s", "training_tokens_pct": "training_tokens_pct",
        "mfu_pct_as_logged": "mfu_pct_as_logged", "tflops_as_logged": "tflops_as_logged",
        "mfu_pct_from_config": "mfu_pct", "tflops_from_config": "tflops",
        "logged_steps_after_step_1": "num_steps", "gpus": "gpus", "scaling_factor": "factor",
        "fsdp": "fsdp",
    }  # fmt: skip
    for row in csv.DictReader((SEED_LOGS / "expected_means.csv").read_text().splitlines()):
        [line] = [line for line in text.splitlines() if row["log"] in line]
        for column, name in columns.items():
            value = found[row["log"]][name]
            shown = f"{float(value):.2f}" if value and "." in row[column] else value
            assert shown == row[column], (row["log"], column)
        if row["tokens_per_s"]:
            assert f"| {float(row['tokens_per_s']):,.2f} | {row['training_tokens_pct']} |" in line
            assert f"| {row['mfu_pct_from_config']} | {row['mfu_pct_as_logged']} |" in line
    for words in (
        "FSDP or not comes from the name of the folder for 6 older logs",
        "in 13 logs MFU is 1.17 to 4.89 times what they say",
        "left out: load_model_no_fsdp/lsai-453992.out: it does not name its sequence_length",
    ):
        assert words in text and words in err
    assert "lsai-460667.out | no: out of memory" in text


@needs_seed_logs
def test_lines_of_the_older_logs() -> None:
    lines, _ = lines_of(SEED_LOGS)
    assert set(lines) == {
        ("1 GPU, no FSDP", "strategy all"), ("1 GPU, no FSDP", "strategy n_layers"),
        ("2 GPUs on 2 nodes, FSDP", "strategy all"), ("4 GPUs, FSDP", "strategy all"),
        ("8 GPUs, FSDP", "strategy n_layers"), ("16 GPUs on 4 nodes, FSDP", "strategy all"),
    }  # fmt: skip
    many = lines["16 GPUs on 4 nodes, FSDP", "strategy all"].points.set_index("factor")
    assert many["n"].to_dict() == {1: 1, 6: 1, 10: 2, 14: 2, 20: 1}
    assert many["cut_short"].to_dict() == {1: False, 6: False, 10: False, 14: True, 20: False}
    assert many.loc[20, "status"] == "out_of_memory"
    two = lines["2 GPUs on 2 nodes, FSDP", "strategy all"].points.set_index("factor")
    assert two.loc[6, "mfu"] == pytest.approx(8.85 * 6547.21 / 6461.70, abs=0.02)
    assert two.loc[6, "scaling_efficiency"] == pytest.approx(100 * 6547.21 / 18276.505)
    logged, _ = lines_of(SEED_LOGS, "as-logged")
    two = logged["2 GPUs on 2 nodes, FSDP", "strategy all"].points.set_index("factor")
    assert two.loc[6, "mfu"] == pytest.approx(6.01 * 6547.21 / 6461.70, abs=0.02)
    assert two.loc[6, "tflops"] == pytest.approx(59.40 * 6547.21 / 6461.70, abs=0.1)


def test_points_are_medians_with_quartiles(write: Write, tmp_path: Path) -> None:
    write([1.0, 1.0, 100.0, 200.0, 600.0, 300.0])
    [line] = lines_of(tmp_path / "logs")[0].values()
    [point] = line.points.itertuples()
    values = [getattr(point, f"tokens_per_sec{end}") for end in ("_low", "", "_high")]
    assert values == [175, 250, 375]
    mfu = 100 * flops_per_token(build_config("all", 2, 131_072), 4096) / 989e12
    assert [point.mfu_low, point.mfu, point.mfu_high] == pytest.approx([mfu * v for v in values])
    assert (point.peak_memory_low, point.peak_memory, point.peak_memory_high) == (60, 60, 66)
    assert (point.scaling_efficiency, point.training_tokens_pct) == (100, 99)


def test_repeats_are_pooled_and_their_range_is_the_bar(write: Write, tmp_path: Path) -> None:
    for speed in (100.0, 140.0):
        write([1.0, 1.0, speed, speed], flags={"set_seed": int(speed), "log_file": f"{speed}"})
    write([1.0, 1.0, 50.0, 50.0], status=None, factor=4)
    [line] = lines_of(tmp_path / "logs")[0].values()
    small, large = line.points.itertuples()
    assert (small.n, small.tokens_per_sec_low, small.tokens_per_sec, small.tokens_per_sec_high) == (
        2, 100, 120, 140,
    )  # fmt: skip
    assert (small.cut_short, large.cut_short, large.n) == (False, True, 1)


@pytest.mark.parametrize(
    ("changes", "variants"),
    [
        ({"flags": {"batch_size": 8}}, ["batch 1", "batch 8"]),
        ({"flags": {"sequence_length": 512}}, ["sequence 4096", "sequence 512"]),
        ({"flags": {"model_dtype": "fp32"}}, ["bf16 weights", "fp32 weights"]),
        ({"flags": {"activation_checkpointing": "full"}}, ["", "checkpointing full"]),
        ({"flags": {"activation_checkpointing": None}}, ["activation checkpointing not logged",
                                                         "checkpointing none"]),
        ({"flags": {"compile": False}}, ["compiled", "not compiled"]),
        ({"flags": {"packing": False}}, ["not packing", "packing"]),
        ({"compute_dtype": "float32"}, ["bf16 compute", "fp32 compute"]),
        ({"device": "NVIDIA H100 NVL"}, ["NVIDIA H100 NVL", "NVIDIA H200"]),
        ({"device": None}, ["NVIDIA H200", "device not logged"]),
        ({"versions": {"torch": "2.13"}}, ["torch 2.11", "torch 2.13"]),
        ({"peak_tflops": 500.0}, ["peak 500 TFLOP/s", "peak 989 TFLOP/s"]),
        ({"flags": {"new_flag": 3}}, ["", "new flag 3"]),
    ],
)  # fmt: skip
def test_runs_that_differ_share_no_line(
    write: Write, tmp_path: Path, changes: dict[str, Any], variants: list[str]
) -> None:
    """Same size or another: a line of its own, named by what differs and by nothing else."""
    for factor in (2, 4):
        write([1.0, 1.0, 100.0], factor=factor)
        write([1.0, 1.0, 900.0], factor=factor, **copy.deepcopy(changes))
    lines, _ = lines_of(tmp_path / "logs")
    assert sorted(variant for _, variant in lines) == variants
    for line in lines.values():
        assert line.points["tokens_per_sec"].nunique() == 1
        assert line.points["factor"].tolist() == [2, 4]
        assert line.hue == 0


def batches_of(lines: dict[tuple[str, str], Any]) -> dict[tuple[str, str], list[int]]:
    return {key: line.points["batch_size"].tolist() for key, line in lines.items()}


def test_the_largest_batches_of_a_configuration_are_one_line(write: Write, tmp_path: Path) -> None:
    """The largest that fits is another at most sizes; where it is, chance must not matter."""
    for factor, batch in ((2, 120), (4, 30), (6, 30), (8, 6)):
        write([1.0, 1.0, 5.0], factor=factor)
        write([1.0, 1.0, 9.0], factor=factor, flags={"batch_size": batch})
    for factor, batch in ((4, 28), (6, 6), (8, 6)):
        write([1.0, 1.0, 8.0], factor=factor, flags={"batch_size": batch}, **SHARDED)
    for factor in (2, 4):
        write([1.0, 1.0, 7.0], factor=factor, flags={"batch_size": 8})
    write([], factor=8, flags={"batch_size": 7}, status="out_of_memory")
    write([], factor=6, flags={"batch_size": 120}, status="out_of_memory")
    flags = {"batch_size": 30, "cpu_offload": True}
    write([1.0, 1.0, 8.0], factor=2, flags=flags, world_size=2, **SHARDED)
    lines, _ = lines_of(tmp_path / "logs")
    found = batches_of(lines)
    assert found.pop(("2 GPUs, FSDP", "batch 30, CPU offload")) == [30]
    assert found == {
        ("1 GPU, no FSDP", "batch 1"): [1, 1, 1, 1],
        ("1 GPU, no FSDP", "batch 8"): [8, 8],
        ("1 GPU, no FSDP", "batch as labelled"): [120, 30, 30, 120, 6, 7],
        ("1 GPU, FSDP", "batch as labelled"): [28, 6, 6],
    }
    labelled = {key for key, line in lines.items() if line.has_own_batches}
    assert labelled == {key for key in found if "labelled" in key[1]}


def test_a_batch_that_is_not_always_the_largest_keeps_its_line(
    write: Write, tmp_path: Path
) -> None:
    for factor, batches in ((2, (1, 8, 16)), (4, (1, 8, 30)), (6, (1, 8)), (8, (1, 3))):
        for batch in batches:
            write([1.0, 1.0, 5.0], factor=factor, flags={"batch_size": batch})
    write([1.0, 1.0, float("nan")], factor=6, flags={"batch_size": 12})
    assert batches_of(lines_of(tmp_path / "logs")[0]) == {
        ("1 GPU, no FSDP", "batch 1"): [1, 1, 1, 1],
        ("1 GPU, no FSDP", "batch 8"): [8, 8, 8],
        ("1 GPU, no FSDP", "batch 12"): [12],
        ("1 GPU, no FSDP", "batch as labelled"): [16, 30, 3],
    }


def test_one_batch_in_between_does_not_cut_the_line_of_the_largest(
    write: Write, tmp_path: Path
) -> None:
    for factor, batches in ((2, (1, 16)), (4, (1, 8)), (6, (1, 4, 6)), (8, (1, 4))):
        for batch in batches:
            write([1.0, 1.0, 5.0], factor=factor, flags={"batch_size": batch})
    assert batches_of(lines_of(tmp_path / "logs")[0]) == {
        ("1 GPU, no FSDP", "batch 1"): [1, 1, 1, 1],
        ("1 GPU, no FSDP", "batch 4"): [4],
        ("1 GPU, no FSDP", "batch as labelled"): [16, 8, 6, 4],
    }


def test_batches_are_named_where_nothing_else_is_run(write: Write, tmp_path: Path) -> None:
    for factor, batch in ((2, 2), (2, 16), (4, 30)):
        write([1.0, 1.0, 5.0], factor=factor, flags={"batch_size": batch})
    lines, _ = lines_of(tmp_path / "logs")
    assert batches_of(lines) == {
        ("1 GPU, no FSDP", "batch 2"): [2],
        ("1 GPU, no FSDP", "batch as labelled"): [16, 30],
    }
    for path in (tmp_path / "logs").iterdir():
        path.unlink()
    for factor, batch in ((2, 16), (4, 30)):
        write([1.0, 1.0, 5.0], factor=factor, flags={"batch_size": batch})
    [line] = lines_of(tmp_path / "logs")[0].values()
    assert line.has_own_batches
    write([1.0, 1.0, 5.0], factor=6, flags={"batch_size": 4, "compile": False})
    write([1.0, 1.0, 5.0], factor=2, flags={"batch_size": 3}, world_size=16, **SHARDED)
    found = batches_of(lines_of(tmp_path / "logs")[0])
    assert found["1 GPU, no FSDP", "batch 4, not compiled"] == [4]
    assert found["16 GPUs, FSDP", "batch 3, compiled"] == [3]


def test_one_colour_per_configuration(write: Write, tmp_path: Path) -> None:
    sharding = {"cpu_offload": False, "reshard_after_forward": True}
    for batch, (gpus, fsdp) in itertools.product((1, 8), ((1, {}), (1, SHARDED), (16, SHARDED))):
        flags = {"batch_size": batch} | (sharding if fsdp else {})
        write([1.0, 1.0, 5.0], flags=flags, world_size=gpus, num_nodes=gpus // 8 or 1, **fsdp)
    lines, _ = lines_of(tmp_path / "logs")
    hues = {(key[0], line.hue) for key, line in lines.items()}
    shapes = {(key[1], line.shape) for key, line in lines.items()}
    assert sorted(hues, key=lambda pair: pair[1]) == [
        ("1 GPU, no FSDP", 0), ("1 GPU, FSDP", 1), ("16 GPUs on 2 nodes, FSDP", 2),
    ]  # fmt: skip
    assert sorted(shapes) == [("batch 1", 0), ("batch 8", 1)], "flags that FSDP alone has"
    assert len(lines) == 6


def test_what_fsdp_does_by_default_needs_no_words(write: Write, tmp_path: Path) -> None:
    sharding = {"cpu_offload": False, "reshard_after_forward": True}
    write([1.0, 1.0, 9.0])
    for gpus, changes in ((1, {}), (2, {}), (2, {"reshard_after_forward": False})):
        write([1.0, 1.0, 5.0], flags=sharding | changes, world_size=gpus, **SHARDED)
    write([1.0, 1.0, 5.0], flags=sharding | {"cpu_offload": True}, world_size=4, **SHARDED)
    write([1.0, 1.0, 5.0], world_size=4, **SHARDED)
    assert list(lines_of(tmp_path / "logs")[0]) == [
        ("1 GPU, no FSDP", ""), ("1 GPU, FSDP", ""), ("2 GPUs, FSDP", ""),
        ("2 GPUs, FSDP", "no reshard"), ("4 GPUs, FSDP", "reshard, CPU offload"),
        ("4 GPUs, FSDP", ""),
    ]  # fmt: skip


def test_what_one_configuration_did_otherwise_is_named(write: Write, tmp_path: Path) -> None:
    usual = {"cpu_offload": False, "reshard_after_forward": True}
    for gpus, flags in ((1, usual), (2, {"cpu_offload": True, "reshard_after_forward": False})):
        for factor in (1, 2):
            write([1.0, 1.0, 5.0], factor=factor, flags=flags, world_size=gpus, **SHARDED)
    assert {(name, *variant.split(", ")) for name, variant in lines_of(tmp_path / "logs")[0]} == {
        ("1 GPU, FSDP", ""), ("2 GPUs, FSDP", "no reshard", "CPU offload"),
    }  # fmt: skip


def test_the_legend_leaves_room_for_the_figure(write: Write, tmp_path: Path) -> None:
    looks = ["device", "another device with a very long name, indeed a longer one", "a third"]
    for number in range(24):
        flags = {"batch_size": number + 1, "cpu_offload": number % 2 == 0}
        write([1.0, 1.0, 5.0], factor=number % 3 + 1, flags=flags, device=looks[number % 3],
              world_size=number % 5 + 1, **SHARDED)  # fmt: skip
    for folder in (tmp_path / "logs", SEED_LOGS if SEED_LOGS.is_dir() else tmp_path / "logs"):
        figure = plt.figure(figsize=(10, 5.6), layout="constrained")
        lines = list(lines_of(folder)[0].values())
        plots.draw_metric(figure.add_gridspec(1, 1)[0], "tokens_per_sec", lines)
        plots.finish(figure, lines, plots.READING)
        figure.draw_without_rendering()
        [legend] = figure.legends
        box, whole = legend.get_window_extent(), figure.bbox
        assert box.x0 >= -1 and box.x1 <= whole.x1 + 1 and box.y0 >= -1
        assert figure.axes[0].get_window_extent().height > 0.35 * whole.height
        plt.close(figure)


def test_a_narrow_panel_names_its_smallest_and_its_largest_size() -> None:
    axes = plt.figure().subplots()
    plots.scale_sizes(axes, [10, 20, 30, 90], share=0.15)
    assert axes.get_xticks().tolist() == [10, 90]


def test_efficiency_is_against_the_same_size_and_batch(write: Write, tmp_path: Path) -> None:
    for batch, speed in ((1, 200.0), (8, 400.0)):
        write([1.0, 1.0, speed], flags={"batch_size": batch})
        flags = {"batch_size": batch, "cpu_offload": True}
        write([1.0, 1.0, 100.0], flags=flags, world_size=2, **SHARDED)
    write([1.0, 1.0, 100.0], factor=4, flags={"cpu_offload": True}, world_size=2, **SHARDED)
    lines, _ = lines_of(tmp_path / "logs")
    small = lines["2 GPUs, FSDP", "batch 1, CPU offload"].points
    assert small["scaling_efficiency"].tolist()[0] == 50
    assert pd.isna(small["scaling_efficiency"].tolist()[1]), "nothing to compare with"
    large = lines["2 GPUs, FSDP", "batch 8, CPU offload"].points
    assert large["scaling_efficiency"].tolist() == [25]


def test_out_of_memory_stands_at_its_size(write: Write, tmp_path: Path) -> None:
    write([1.0, 1.0, 5.0])
    write([], factor=14, status="out_of_memory", peak_tflops=None)
    [line] = lines_of(tmp_path / "logs")[0].values()
    assert line.points["status"].tolist() == ["trained", "out_of_memory"]
    assert line.points["num_parameters"].tolist() == [190_857_728, 19_128_929_792]


def test_what_is_not_drawn_is_named(write: Write, tmp_path: Path) -> None:
    write([1.0, 1.0, 5.0])
    write([1.0], name="short.out", status="failed")
    write([1.0, 1.0, 5.0], name="profiled.out", flags={"profile": True})
    lines, left_out = lines_of(tmp_path / "logs")
    assert [line.points["n"].tolist() for line in lines.values()] == [[1]]
    assert sorted(left_out) == [
        "profiled.out: it was profiled, which is slower",
        "short.out: failed without a logged step after the warm-up",
    ]


def shares(**seconds: float) -> dict[str, Any]:
    known = {kind.replace(" ", "_"): kind for kind in KINDS}
    found = dict.fromkeys(KINDS, 0.0) | {known[name]: value for name, value in seconds.items()}
    return {"first_step": 12, "num_steps": 2, "wall_s_per_step": 9.0,
            "num_kernels_per_step": 1234.0, "seconds_per_step": found, "shares": found}  # fmt: skip


def test_breakdown_is_of_a_step_without_the_profiler(write: Write) -> None:
    """Step 15 holds steps 12 and 13 and the writing of the trace; the others are as ever."""
    speeds = [4096.0, 4096.0, 4.0, 2048.0, 1024.0]
    path = write(speeds, flags={"profile": True}, breakdown=shares(matmuls=0.5, attention=0.5))
    assert quiet_step_s(read_run(path)) == 3  # median of 2 and 4, which come after the warm-up
    log = read_run(path)
    assert quiet_step_s(replace(log, steps=log.steps[:3])) == 1, "it ends before the warm-up does"
    figure = plots.draw_breakdown([read_run(path)])
    [axes] = figure.axes
    texts = [text.get_text() for text in axes.texts if text.get_text()]
    assert texts[:3] == ["17", "17", "67"]  # attention, matmuls, idle
    assert texts[3].endswith("1,234 kernels") and texts[3].startswith("MFU 0 %")
    assert axes.get_yticklabels()[0].get_text() == "all 2, 1 GPU, no FSDP"
    [legend] = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["attention", "matmuls", "idle"]


def test_figures_of_a_study(write: Write, tmp_path: Path) -> None:
    """A whole study twice over: the same bytes; and the strategy that is named is in the figure."""
    for factor in (1, 2, 8):
        write([1.0, 1.0, 1e6 / factor**3, 1e6 / factor**3 + 9], factor=factor)
        write([1.0, 1.0, 8e5 / factor**3, 9e5 / factor**3], factor=factor, **SHARDED)
    write([], factor=12, status="out_of_memory")
    write([3.0, 3.0, 3.0], flags={"profile": True}, breakdown=shares(matmuls=0.5))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        main(PlotsConfig(logs=tmp_path / "logs", output_dir=folder))
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
        assert path.stat().st_size > 300
    assert len(list(folders[0].iterdir())) == 2 + 2 * len(FIGURES)
    assert set(FOUR) < set(FIGURES)


BAD_INPUT = {
    "empty": "no job log of a training in",
    "absent": "there is no folder",
    "text": "no Run: record",
}


def test_bad_input_ends_with_one_line(write: Write, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "job.out").write_text("Step: 1 | Loss: 1.0\n")
    good = write([1.0, 1.0, 5.0]).parent
    target = tmp_path / "never"
    commands = [(tmp_path / name, target, [], words) for name, words in BAD_INPUT.items()]
    commands += [
        (good, good / "0.out" / "plots", [], "0.out/plots: Not a directory"),
        (good, target, ["--skip-steps", "-1"], "--skip-steps must not be negative"),
        (good, target, ["--mfu", "guess"], "--mfu"),
    ]
    for logs, output, flags, words in commands:
        code, out, err = run("--logs", str(logs), "--output-dir", str(output), *flags)
        assert code == 2, (words, err)
        assert out == "" and len(err.splitlines()) == 1 and words in err, (words, out, err)
        assert not target.exists()


def test_logs_that_are_only_half_usable(write: Write, tmp_path: Path, capsys: Any) -> None:
    """Half-written, two runs in one file, requeued, no Run record, an unknown device."""
    torn = write([1.0, 1.0, 7.0, 9.0], name="torn.out", status=None, device="Some GPU",
                 peak_tflops=None)  # fmt: skip
    torn.write_text(torn.read_text()[:-200])
    for speed, batch in ((5.0, 1), (6.0, 2)):
        write([1.0, 1.0, speed], name="two.out", flags={"batch_size": batch})
    for status in (None, "completed"):
        write([1.0, 1.0, 8.0], name="requeued.out", factor=4, status=status)
    step = StepRecord(1, 11.0, 5.0, 99.0, 1.0, 2.0)
    (tmp_path / "logs" / "bare.log").write_text(format_step(step) + "\n")
    config = PlotsConfig(logs=tmp_path / "logs", output_dir=tmp_path / "plots")
    main(config)
    err = capsys.readouterr().err
    assert "left out: bare.log: it has no Run: record" in err
    assert "MFU is n/a: no peak is known for Some GPU" in err
    text = (tmp_path / "plots" / "results.md").read_text()
    assert text.count("two.out") == 2 and text.count("requeued.out") == 1
    [row] = [line for line in text.splitlines() if "torn.out" in line]
    assert "no: killed" in row and "| n/a | 1.00 |" in row
    lines, _ = lines_of(tmp_path / "logs")
    values = {variant: line.points for (_, variant), line in lines.items()}
    unknown = values["batch 1, Some GPU"]
    assert unknown["tokens_per_sec"].tolist() == [7.0] and unknown["mfu"].isna().all()
    assert len(list((tmp_path / "plots").glob("*.svg"))) == len(UNPROFILED)


def test_a_single_run_and_nothing_but_failures(write: Write, tmp_path: Path) -> None:
    config = PlotsConfig(logs=tmp_path / "logs", output_dir=tmp_path / "plots")
    out_of_memory = write([], status="out_of_memory")
    main(config)
    fine = write([1.0, 1.0, 5.0], factor=4)
    main(config)
    assert "no: out of memory" in (config.output_dir / "results.md").read_text()
    write([], name="failed.out", status="failed")
    for path in (out_of_memory, fine):
        path.unlink()
    main(config)
    text = (config.output_dir / "results.md").read_text()
    assert "left out: failed.out: failed without" in text and "no figure" in text


def axes_of(name: str, folder: Path) -> Any:
    """Axes of one figure of the logs in a folder."""
    figure = plt.figure(layout="constrained")
    lines, _ = lines_of(folder)
    plots.draw_metric(figure.add_gridspec(1, 1)[0], name, list(lines.values()))
    return figure.axes[0]


def test_figures_of_two_runs_on_a_cpu(write: Write, tmp_path: Path) -> None:
    """One size, ranks that are no GPUs, no peak, another batch on two ranks, none profiled."""
    cpu: dict[str, Any] = {"device_type": "cpu", "device": "x86_64", "peak_tflops": None}
    write([1.0, 1.0, 50.0], flags={"batch_size": 2}, **cpu)
    write([1.0, 1.0, 40.0], world_size=2, **cpu, **SHARDED)
    config = PlotsConfig(logs=tmp_path / "logs", output_dir=tmp_path / "plots")
    main(config)
    text = (config.output_dir / "results.md").read_text()
    assert text.startswith("| ranks | nodes |") and "no breakdown of a step" in text
    assert not list(config.output_dir.glob("breakdown*"))
    assert {name for name, _ in lines_of(config.logs)[0]} == {"1 CPU rank, no FSDP",
                                                             "2 CPU ranks, FSDP"}  # fmt: skip
    for name in LABELS:
        axes = axes_of(name, config.logs)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["191 M"]
        assert "GPU" not in axes.get_title(loc="left")
        low, high = axes.get_xlim()
        assert low < 190_857_728 < high
    [why] = [text.get_text() for text in axes_of("mfu", config.logs).texts]
    assert why == "not drawn: no peak is known for the device"
    assert not axes_of("scaling_efficiency", config.logs).texts, "the caption tells what is missing"


def test_ticks_are_sizes_with_room_between_them(write: Write, tmp_path: Path) -> None:
    for factor in (1, 2, 4, 6, 8, 9, 10, 12):
        write([1.0, 1.0, 5.0], factor=factor)
    axes = axes_of("tflops", tmp_path / "logs")
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["75.5 M", "191 M", "705 M", "1.86 B", "5.53 B"]
    top = max(axes.get_ylim())
    assert top > 1.05 * axes.collections[-1].get_offsets()[:, 1].max(), "no marker is cut"


def test_many_logs_are_drawn_in_time(write: Write, tmp_path: Path) -> None:
    """2,000 logs of 1,000 steps take less than 30 s; here 100, and the figures, on any machine."""
    path = write([])
    step = StepRecord(1, 11.1, 7774.49, 99.1, 40.1, 400.1, 1.2, 3e-6, 0.52, 54.3, 60.1)
    lines = [format_step(step).replace("Step: 1 ", f"Step: {n} ") + "\n" for n in range(1, 1001)]
    text = "".join(lines)
    head, end = path.read_text().splitlines(keepends=True)
    for number in range(100):
        (path.parent / f"{number}.out").write_text(head + text + end)
    started = time.process_time()
    main(PlotsConfig(logs=path.parent, output_dir=tmp_path / "plots"))
    assert time.process_time() - started < 60


@pytest.mark.skipif(
    not list((ROOT / "plots").glob("published/*/results.csv")), reason="no study is published yet"
)
def test_published_figures_are_fresh() -> None:
    for path in (ROOT / "plots" / "published").glob("*/results.csv"):
        folder = ROOT / "logs" / "published" / path.parent.name / "scaling"
        frame = runs_table(PlotsConfig(logs=folder), load_runs(folder)[0])
        assert path.read_text() == results_csv(frame), "run make figures"


def test_table_columns_hold_what_the_study_needs(write: Write, tmp_path: Path) -> None:
    write([1.0, 1.0, 5.0])
    frame = runs_table(PlotsConfig(logs=tmp_path / "logs"), load_runs(tmp_path / "logs")[0])
    needed = (
        "strategy factor num_parameters fsdp gpus nodes batch_size compute_dtype compiled num_steps"
        " activation_checkpointing tokens_per_s tokens_per_s_median tokens_per_s_p25 mfu_pct tflops"
        " training_tokens_pct peak_gib status log commit device torch_version"
    )
    assert set(needed.split()) <= set(frame.columns) == set(table([]).columns)
    assert json.loads(frame["other_flags"].item()) == {"packing": True, "profile": False}
