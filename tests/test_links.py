"""Does the model of exposed communication add up, and does the benchmark write what it reads?"""

import os
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import cast

import pytest

from link_report import COLLECTIVES, Links, link_section, plot_projection, replicate_from
from links import SHAPES, Group, Line, fit_line, groups_of, ring, step_s, transport_of
from model_config import build_config, count_params, flops_per_token
from run_log import LogWriter, StepRecord, read_run

ROOT = Path(__file__).resolve().parent.parent
SLOW = "sockets on loopback"


def bench(folder: Path, *flags: str) -> str:
    """Run the benchmark's small version; return what it says it ran."""
    command = [sys.executable, "benchmarks/bench_links.py", "--output-dir", str(folder), "--tiny"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
        timeout=400,
    ).stderr  # fmt: skip


def test_the_benchmark_makes_the_logs_that_are_missing(tmp_path: Path) -> None:
    said = bench(tmp_path, "--only", "sockets") + bench(tmp_path, "--only", "simulated")
    assert said.count("status 0") == 3, said
    bandwidth, simulated, training = (read_run(path) for path in sorted(tmp_path.glob("*.out")))
    for run, transport in ((bandwidth, SLOW), (training, SLOW), (simulated, "")):
        assert run.status == "completed"
        assert transport_of(run.run or {}) == transport
    assert [step.step for step in training.steps] == [1, 4, 8, 12, 16]
    assert (training.run or {})["world_size"] == (simulated.run or {})["world_size"] == 2
    assert all(0 < step.grad_norm < 100 for step in simulated.steps if step.grad_norm)
    assert [(link["collective"], link["dtype"], link["bytes"]) for link in bandwidth.links] == [
        (name, dtype, numel * width)
        for numel in (2**16, 2**18)
        for name, dtype, width in (
            ("all_gather", "bfloat16", 2),
            ("reduce_scatter", "float32", 4),
            ("reduce_scatter", "bfloat16", 2),
        )
    ]
    for link in bandwidth.links:
        assert 0 < link["lowest_s"] <= link["median_s"] <= link["highest_s"]
        assert link["bus_gb_per_s"] == pytest.approx(link["bytes"] / 2 / link["median_s"] / 1e9)
    assert "status" not in bench(tmp_path, "--only", "sockets"), "what is complete is not repeated"
    training.path.unlink()
    bench(tmp_path, "--only", "sockets", "--max-minutes", "0")
    assert not training.path.exists(), "nothing is started when time is out"


def test_a_line_is_fitted_in_relative_terms() -> None:
    def fit(*points: tuple[float, float]) -> Line:
        return fit_line({"bytes": num_bytes, "median_s": seconds} for num_bytes, seconds in points)

    exact = fit((2, 3), (4, 4), (100, 52))
    assert (exact.latency_s, exact.s_per_byte) == pytest.approx((2, 0.5))
    # At 0 bytes, 1 s and 3 s: (a - 1)² + (a - 3)²/9 is least at 1.2, where the third point fits.
    between = fit((0, 1), (0, 3), (1, 2.2))
    assert (between.latency_s, between.s_per_byte) == pytest.approx((1.2, 1))
    assert fit((1, 0.5), (2, 1.5)).latency_s == 0
    assert Line(7, 0.25).bus_bytes_per_s == 2


def test_groups_hold_all_parameters_and_flops() -> None:
    for strategy, factor in SHAPES:
        config = build_config(strategy, factor, 1000)
        groups = groups_of(config, 77)
        assert len(groups) == config.n_layers + 2
        assert sum(group.num_params for group in groups) == count_params(config)
        assert sum(group.flops for group in groups) == flops_per_token(config, 77)


# Embedding, two blocks and a head, of which each block computes 1 s forward and 2 s backward.
GROUPS = [Group(1, 0), Group(1, 1), Group(1, 1), Group(1, 0)]


@pytest.mark.parametrize(
    ("gather", "scatter", "all_reduce", "expected"),
    [
        (0, 0, None, 6),
        # Waited for: the embedding and the first block; backward, the second, as the head computes
        # nothing to hide it.
        (0.5, 0, None, 6 + 3 * 0.5),
        # Forward four gathers in a row, backward three: each hides what is computed meanwhile.
        (3, 0, None, 4 * 3 + 3 * 3),
        # Waited for: the reductions of the first block and of the embedding, at the end.
        (0, 0.5, None, 6 + 2 * 0.5),
        # Behind the forward, four reductions in a row.
        (0, 3, None, 2 + 4 * 3),
        # Forward to 4; gather until 5; then the link carries the head's reduction and a gather
        # while a block computes until 7, the next two until 9, and two reductions until 11.
        (1, 1, None, 11),
        # Four gathers in a row forward; backward the link never rests: three, and four reductions.
        (2, 2, None, 4 * 2 + 7 * 2),
        # Ends 2 s after the backward: of the first block's reduction, then the embedding's.
        (0, 0, 1, 6 + 2 * 1),
        (0, 0, 3, 2 + 4 * 3),
    ],
)  # fmt: skip
def test_communication_hides_where_the_schedule_lets_it(
    gather: float, scatter: float, all_reduce: float | None, expected: float
) -> None:
    replicated = None if all_reduce is None else Line(all_reduce, 0)
    lines = {"gather": Line(gather, 0), "scatter": Line(scatter, 0), "all_reduce": replicated}
    assert step_s(GROUPS, 6.0, **lines) == pytest.approx(expected)


def test_parameters_are_gathered_in_bf16_and_gradients_reduced_in_fp32() -> None:
    groups = [Group(10, 0), Group(0, 1), Group(0, 1), Group(0, 0)]
    assert step_s(groups, 6.0, gather=Line(0, 0.01), scatter=Line(0, 0)) == pytest.approx(6.2)
    assert step_s(groups, 6.0, gather=Line(0, 0), scatter=Line(0, 0.01)) == pytest.approx(6.4)


def test_a_gather_waits_for_the_reduction_that_was_issued_before_it() -> None:
    groups = [Group(0, 0), Group(0, 1), Group(0, 1), Group(10, 0)]
    # The head's reduction takes 4 s: the last block is done after 2, the first begins after all.
    found = step_s(groups, 6.0, gather=Line(0, 0), scatter=Line(0, 0.1))
    assert found == pytest.approx(2 + 4 + 2)


def test_a_ring_grows_in_hops_and_is_bound_by_its_slowest_link() -> None:
    measured = Line(10e-6, 0.5 / 400e9)
    two, eight, many, slow = (
        ring(measured, gpus=gpus, nodes=nodes, link_bytes_per_s=rate)
        for gpus, nodes, rate in ((2, 1, 1e9), (8, 1, 1e9), (32, 4, 60e9), (32, 4, 25e9))
    )
    assert two == measured
    assert eight.latency_s == pytest.approx(10e-6 + 6 * 3.4e-6)
    assert eight.s_per_byte == pytest.approx(7 / 8 / 400e9)
    # 31 hops, of which 3 leave a node and one was measured.
    assert many.latency_s == slow.latency_s == pytest.approx(10e-6 + 27 * 3.4e-6 + 3 * 14e-6)
    assert many.s_per_byte == pytest.approx(31 / 32 / 400e9), "NVLink bounds it: 8 · 60 > 400"
    assert slow.s_per_byte == pytest.approx(31 / 32 / 200e9)


def write_logs(folder: Path) -> None:
    """NVLink of 10 µs and 400 GB/s; `all` 10 in 1 s a step, or 0.8 s where nothing travels."""
    log = LogWriter(folder / "bandwidth.out")
    facts = {"world_size": 2, "nccl_environment": {"NCCL_NVLS_ENABLE": "0"}}
    what = {"device": "NVIDIA H200", "versions": {"torch": "2.11", "nccl": "2.28"}}
    log.record("Run", {"script": "bench_links.py", "num_windows": 5, **what, **facts})
    for kind, (group, num_bytes) in product(COLLECTIVES, (("2^20", 1e6), ("all 10 block", 1e8))):
        seconds = 10e-6 + num_bytes / 2 / 400e9
        values = {"median_s": seconds, "bus_gb_per_s": num_bytes / 2 / seconds / 1e9}
        values |= {"collective": kind[0], "dtype": kind[1], "bytes": num_bytes, "group": group}
        log.record("Link", values)
    log.record("End", {"status": "completed"})
    log.close()
    flags = {"scaling_strategy": "all", "scaling_factor": 10, "sequence_length": 4096}
    facts |= {"config": flags | {"logging_frequency": 4}, "tokens_per_step": 8192}
    facts |= {"model": asdict(build_config("all", 10, 131_072))}
    for script, seconds in (("train_fsdp.py", 1.0), ("simulated_train.py", 0.8)):
        log = LogWriter(folder / f"{script}.out")
        log.record("Run", {"script": script, **facts})
        for step, took_s in ((1, 30.0), (4, 9.0), (8, seconds), (12, 1.5), (16, seconds)):
            log.step(StepRecord(step, 1.0, 1.0, 99.0, None, None, step_s=took_s))
        log.record("End", {"status": "completed"})
        log.close()


def test_the_report_says_what_the_logs_do(tmp_path: Path) -> None:
    assert link_section(tmp_path) == ""
    plot_projection(tmp_path, tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()
    write_logs(tmp_path)
    section = link_section(tmp_path)
    assert "NVIDIA H200, torch 2.11, NCCL 2.28: collectives of two GPUs" in section
    # 10^8 bytes: 50 MB ÷ 135 µs.
    row = "| NVLink | reduce-scatter | float32 | 10.0 | 400.0 | 0.0 | n/a | 370.4 | n/a | n/a |"
    assert row in section
    # The embedding holds 131,072 · 2,560 parameters, a block 83,235,840. All else hides behind the
    # computation: the gathers of the embedding and the first block, their reductions.
    exposed_s = 4 * 10e-6 + 6 * (335_544_320 + 83_235_840) / 2 / 400e9
    predicted = f"{800 + 1e3 * exposed_s:.1f} | {100 * (exposed_s - 0.2):.1f}"
    assert predicted == "803.2 | -19.7"
    row = (
        f"| `all` 10 | NVLink | 4,096 | 1000.0 | 50.0 | 800.0 | 20.0 | {predicted} | train_fsdp.py"
    )
    assert row in section
    plot_projection(tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_the_projection_by_hand(tmp_path: Path) -> None:
    write_logs(tmp_path)
    found = Links(tmp_path)
    assert found.projectable == [("all", 10)]
    ends, block, all_params = 335_544_320, 83_235_840, 7_329_958_400
    # Eight GPUs of a node update an eighth of the parameters each, not a half.
    step_s = 0.8 - 16 * all_params * (1 / 2 - 1 / 8) / 4.8e12
    step_s += 4 * (10e-6 + 6 * 3.4e-6) + 6 * (ends + block) * 7 / 8 / 400e9
    for replicate in (False, True):
        speed = found.projected(("all", 10), 8, 12.5, replicate)
        assert speed == pytest.approx(4096 / step_s, rel=1e-6)
    # A second node: at the end the embedding's gradients go around between the two, an eighth of
    # them over each link, twice half of their bytes.
    step_s += 10e-6 + 2 * 14e-6 + 4 * ends / 8 / 50e9
    assert found.projected(("all", 10), 16, 50, True) == pytest.approx(4096 / step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("faster", "first"),
    [({16, 32, 64, 128, 256, 512}, 16), ({16, 256, 512}, 256), ({16, 256}, None), (set(), None)],
)
def test_replicas_pay_from_where_they_are_always_faster(
    faster: set[int], first: int | None
) -> None:
    class Table:
        def projected(self, shape: object, gpus: int, gb_per_s: float, replicate: bool) -> float:
            return 2.0 if replicate == (gpus in faster) else 1.0

    assert replicate_from(cast(Links, Table()), ("all", 10), 50) == first
