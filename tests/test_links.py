"""Does the model of exposed communication add up, and does the benchmark write what it reads?"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import cast

import pytest
from bench_links import BenchConfig

import link_report
import links
from link_report import COLLECTIVES, Links, link_section, plot_projection, replicate_from
from links import (
    SHAPES,
    Group,
    Line,
    fit_line,
    groups_of,
    projected_step_s,
    ring,
    step_s,
    transport_of,
)
from model_config import build_config, count_params, flops_per_token
from run_log import LogWriter, StepRecord, read_run

ROOT = Path(__file__).resolve().parent.parent
SLOW = "sockets on loopback"


def start_bench(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Start the benchmark."""
    command = [sys.executable, "benchmarks/bench_links.py", "--output-dir", str(folder), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def bench(folder: Path, *flags: str) -> str:
    """Run the benchmark's small version; return what it says it ran."""
    process = start_bench(folder, "--tiny", *flags)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return said


def processes_that_name(word: str, library: str = "") -> list[str]:
    """Process ids of those with this word in their command line, that have loaded a library."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, maps = ((path / name).read_bytes() for name in ("cmdline", "maps"))
            if word.encode() in words and library.encode() in maps:
                found.append(path.name)
        except OSError:  # it has ended
            continue
    return found


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
            ("all_to_all", "bfloat16", 2),
            ("reduce_scatter", "float32", 4),
        )
    ]
    for link in bandwidth.links:
        assert 0 < link["lowest_s"] <= link["median_s"] <= link["highest_s"]
        assert link["bus_gb_per_s"] == pytest.approx(link["bytes"] / 2 / link["median_s"] / 1e9)
    assert "status" not in bench(tmp_path, "--only", "sockets"), "what is complete is not repeated"
    training.path.unlink()
    bench(tmp_path, "--only", "sockets", "--max-minutes", "0")
    assert not training.path.exists(), "nothing is started when time is out"
    _, said = (real := start_bench(tmp_path)).communicate(timeout=400)
    assert real.returncode == 2 and said.count("\n") == 1, said
    assert f"{bandwidth.path.name} cannot be used: it ran on 2 cpu ranks" in said
    with pytest.raises(ValueError, match=rf"{bandwidth.path.name} cannot be used: it ran on 2 cpu"):
        link_section(tmp_path)


def test_a_small_series_has_a_folder_of_its_own() -> None:
    real, tiny = (BenchConfig(tiny=tiny).folder for tiny in (False, True))
    assert (real, tiny) == (Path("logs/bench_links"), Path("logs/bench_links_tiny"))
    assert BenchConfig(output_dir=Path("x"), tiny=True).folder == Path("x")


def test_a_signal_ends_all_ranks(tmp_path: Path) -> None:
    process = start_bench(tmp_path, "--tiny", "--only", "bandwidth_NVLink")
    deadline = time.monotonic() + 400

    def wait_for(holds: Callable[[], bool]) -> None:
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    # The benchmark, torchrun, and its two ranks, which torchrun knows of when they load torch.
    wait_for(lambda: len(processes_that_name(tmp_path.name, library="libtorch")) >= 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=400)  # until the ranks have closed standard error as well
    assert process.returncode == -signal.SIGTERM
    wait_for(lambda: not processes_that_name(tmp_path.name))
    logs = [read_run(path) for path in tmp_path.glob("*.out")]
    assert "completed" not in [log.status for log in logs], "the ranks went on to their end"


def test_a_line_is_fitted_in_relative_terms() -> None:
    def fit(*points: tuple[float, float]) -> Line:
        return fit_line({"bytes": num_bytes, "median_s": seconds} for num_bytes, seconds in points)

    exact = fit((2, 3), (4, 4), (100, 52))
    assert (exact.latency_s, exact.s_per_byte) == pytest.approx((2, 0.5))
    # At 0 bytes, 1 s and 3 s: (a - 1)² + (a - 3)²/9 is least at 1.2, where the third point fits.
    between = fit((0, 1), (0, 3), (1, 2.2))
    assert (between.latency_s, between.s_per_byte) == pytest.approx((1.2, 1))
    assert fit((1, 0.5), (2, 1.5)).latency_s == 0
    for points in (((1, 2), (2, 1)), ((1, 2), (2, 2))):
        with pytest.raises(ValueError, match="seconds do not grow with its bytes"):
            fit(*points)
    for points in (((1, 2), (1, 3)), ()):
        with pytest.raises(ValueError, match="two sizes"):
            fit(*points)
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


@pytest.mark.parametrize(
    ("gather", "scatter", "all_reduce", "expected"),
    [
        # Seven gathers, of which the computation hides four.
        (0.5, 0, None, 7.5 + 4 * 0.5 / 2),
        # Of four reductions it hides two, and so of all-reduces.
        (0, 0.5, None, 7 + 2 * 0.5 / 2),
        (0, 0, 1, 8 + 2 * 1 / 2),
        # All of the computation runs beside a gather.
        (3, 0, None, 21 + 6 / 2),
        # Blocks compute backward from 2 to 6. Reductions: of the head until 3, the second block 4
        # to 5, the others 6 to 8; all-reduces 3 to 4, 5 to 6, 7 to 9: two of four are hidden.
        (0, 1, 1, 9 + (2 + 2) / 2),
        # Blocks compute backward 2 to 4 and, since a gather waits for the link, 5 to 7, beside the
        # reductions, which never rest from 2 on; of the all-reduces, from 5 on, beside the first.
        (0, 3, 3, 17 + (4 + 2) / 2),
        (0, 0, None, 6),
    ],
)
def test_what_is_hidden_slows_down_what_is_computed(
    gather: float, scatter: float, all_reduce: float | None, expected: float
) -> None:
    replicated = None if all_reduce is None else Line(all_reduce, 0)
    lines = {"gather": Line(gather, 0), "scatter": Line(scatter, 0), "all_reduce": replicated}
    assert step_s(GROUPS, 6.0, slowdown=0.5, **lines) == pytest.approx(expected)


def test_gradients_are_exchanged_in_bf16_in_a_node_and_reduced_in_fp32_across_nodes() -> None:
    groups, byte = [Group(10, 0), Group(0, 1), Group(0, 1), Group(0, 0)], Line(0, 0.01)
    nothing = Line(0, 1e-18)

    def added(*lines: Line, gpus: int, replicate: bool = False) -> float:
        step = projected_step_s(
            groups, 6.0, cast(tuple[Line, Line, Line], lines), gpus=gpus, gpus_per_node=2,
            link_bytes_per_s=1e18, replicate=replicate,
        )  # fmt: skip
        return step - 6.0

    assert added(byte, nothing, nothing, gpus=2) == pytest.approx(0.2, rel=1e-3)
    assert added(nothing, byte, nothing, gpus=2) == pytest.approx(0.2, rel=1e-3)
    assert added(nothing, nothing, byte, gpus=2) < 1e-3
    # Over four of two nodes a ring sends 3/4 of the bytes, of which two ranks send 1/2.
    assert added(nothing, nothing, byte, gpus=4) == pytest.approx(0.6, rel=1e-3)
    assert added(nothing, byte, nothing, gpus=4) < 1e-3
    assert added(nothing, nothing, byte, gpus=4, replicate=True) == pytest.approx(0.4, rel=1e-3)


def test_a_gather_waits_for_the_reduction_that_was_issued_before_it() -> None:
    groups = [Group(0, 0), Group(0, 1), Group(0, 1), Group(10, 0)]
    # The head's reduction takes 4 s: the last block is done after 2, the first begins after all.
    found = step_s(groups, 6.0, gather=Line(0, 0), scatter=Line(0, 0.4))
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


def test_what_the_model_does_not_hold_for_is_refused() -> None:
    line = Line(10e-6, 0.5 / 400e9)
    for gpus, rate in ((1, 1e9), (0, 1e9), (2, 0), (2, -1e9)):
        with pytest.raises(ValueError, match="two GPUs"):
            ring(line, gpus=gpus, nodes=1, link_bytes_per_s=rate)
    what = {"gpus_per_node": 8, "link_bytes_per_s": 1e9}
    for gpus, replicate in ((1, False), (12, False), (12, True), (20, True)):
        with pytest.raises(ValueError):
            projected_step_s(
                GROUPS, 6.0, (line, line, line), gpus=gpus, replicate=replicate, **what
            )


@pytest.fixture(autouse=True)
def projected(monkeypatch) -> None:
    monkeypatch.setattr(link_report, "PROJECTED", (("all", 10), ("n_layers", 1)))


BANDWIDTH, TRAINED, SIMULATED = "bandwidth.out", "train_fsdp.py.out", "simulated_train.py.out"
STEP_S = r"(?<=Step time \(s\): )(?!30|9).*"  # after the warm-up


def rewrite(path: Path, old: str, new: str) -> None:
    """Replace a pattern that is there."""
    text, count = re.subn(old, new, path.read_text())
    assert count
    path.write_text(text)


def write_logs(folder: Path) -> None:
    """NVLink of 10 µs and 400 GB/s; `all` 10 in 1 s a step, or 0.8 s where nothing travels."""
    log = LogWriter(folder / "bandwidth.out")
    facts = {"device_type": "cuda", "world_size": 2}
    facts |= {"nccl_environment": {"NCCL_NVLS_ENABLE": "0"}}
    facts |= {"device": "NVIDIA H200", "versions": {"torch": "2.11", "nccl": "2.28"}}
    log.record("Run", {"script": "bench_links.py", "method": 2, "num_windows": 5, **facts})
    for kind, (group, num_bytes) in product(COLLECTIVES, (("2^20", 1e6), ("all 10 block", 1e8))):
        seconds = 10e-6 + num_bytes / 2 / 400e9
        values = {"median_s": seconds, "bus_gb_per_s": num_bytes / 2 / seconds / 1e9}
        values |= {"collective": kind[0], "dtype": kind[1], "bytes": num_bytes, "group": group}
        log.record("Link", values)
    log.record("End", {"status": "completed"})
    log.close()
    flags = {"scaling_strategy": "all", "scaling_factor": 10, "sequence_length": 4096}
    flags |= {"batch_size": 1, "model_dtype": "bf16", "compute_dtype": None, "logging_frequency": 4}
    facts |= {"config": flags, "tokens_per_step": 8192, "gradients_exchanged": True}
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
    # computation: the gathers of the embedding and the first block, their exchanges.
    exposed_s = 4 * 10e-6 + 4 * (335_544_320 + 83_235_840) / 2 / 400e9
    predicted = f"{800 + 1e3 * exposed_s:.1f} | {100 * (exposed_s - 0.2):.1f}"
    assert predicted == "802.1 | -19.8"
    row = (
        f"| `all` 10 | NVLink | 4,096 | 1000.0 | 50.0 | 800.0 | 20.0 | {predicted} | train_fsdp.py"
    )
    assert row in section
    plot_projection(tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_the_slowdown_is_that_of_one_step(tmp_path: Path, monkeypatch) -> None:
    write_logs(tmp_path)
    assert Links(tmp_path).slowdown == 0, "the step that it is taken from is not there"
    assert "(`n_layers` 1 over NVLink) was not measured" in link_section(tmp_path)
    monkeypatch.setattr(link_report, "FITTED", (("all", 10), "NVLink"))
    ends, all_params = 335_544_320, 7_329_958_400
    exposed_s = 4 * 10e-6 + 4 * (ends + 83_235_840) / 2 / 400e9
    # 82 groups are gathered, all but the head (with its norm) again, and exchanged.
    busy_s = 245 * 10e-6 + 2 * (3 * all_params - ends - 2560) / 2 / 400e9
    rewrite(tmp_path / TRAINED, STEP_S, "0.82000")
    slowdown = (0.02 - exposed_s) / (busy_s - exposed_s)
    assert Links(tmp_path).slowdown == pytest.approx(slowdown)
    section = link_section(tmp_path)
    assert f"communication: {slowdown:.2f} seconds for each of its seconds" in section
    assert "| 800.0 | 2.4 | 820.0 | +0.0 | train_fsdp.py" in section
    speed = Links(tmp_path).projected(("all", 10), 2, 12.5, False)
    assert speed == pytest.approx(4096 / 0.82, rel=1e-6)
    # More than all communication and all computation one after the other is no slowdown.
    rewrite(tmp_path / TRAINED, STEP_S, f"{0.7999 + busy_s:.5f}")
    assert Links(tmp_path).slowdown == pytest.approx(1, abs=1e-2)
    rewrite(tmp_path / TRAINED, STEP_S, f"{0.8001 + busy_s:.5f}")
    with pytest.raises(ValueError, match=rf"{TRAINED} cannot be used: .* if nothing is hidden"):
        assert Links(tmp_path).slowdown


def test_the_projection_by_hand(tmp_path: Path) -> None:
    write_logs(tmp_path)
    found = Links(tmp_path)
    assert found.projectable == [("all", 10)]
    ends, block, all_params = 335_544_320, 83_235_840, 7_329_958_400
    # Eight GPUs of a node update an eighth of the parameters each, not a half.
    step_s = 0.8 - 16 * all_params * (1 / 2 - 1 / 8) / 4.8e12
    step_s += 4 * (10e-6 + 6 * 3.4e-6) + 4 * (ends + block) * 7 / 8 / 400e9
    for replicate in (False, True):
        speed = found.projected(("all", 10), 8, 12.5, replicate)
        assert speed == pytest.approx(4096 / step_s, rel=1e-6)
    # A second node: gradients are reduced in fp32, and at the end the embedding's go around between
    # the two, an eighth of them over each link, twice half of their bytes.
    step_s += 2 * (ends + block) * 7 / 8 / 400e9 + 10e-6 + 2 * 14e-6 + 4 * ends / 8 / 50e9
    assert found.projected(("all", 10), 16, 50, True) == pytest.approx(4096 / step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("faster", "first"),
    [({16, 32, 64, 128, 256, 512}, 16), ({16, 256, 512}, 256), ({16, 256}, None), (set(), None)],
)
def test_replicas_pay_from_where_they_are_always_faster(
    faster: set[int], first: int | None
) -> None:
    class Table:
        margin = 0.0

        def projected(self, shape: object, gpus: int, gb_per_s: float, replicate: bool) -> float:
            return 2.0 if replicate == (gpus in faster) else 1.0

    assert replicate_from(cast(Links, Table()), ("all", 10), 50) == first
    Table.margin = 0.9
    assert replicate_from(cast(Links, Table()), ("all", 10), 50) == first
    Table.margin = 1.1
    assert replicate_from(cast(Links, Table()), ("all", 10), 50) is None


def test_half_of_the_latency_moves_replicas_as_the_page_says(monkeypatch) -> None:
    monkeypatch.setattr(link_report, "PROJECTED", (("all", 6), ("n_layers", 1)))
    found = Links(ROOT / "logs" / "published" / "h200" / "links")
    ways = [(shape, link) for shape in found.projectable for link in link_report.LINKS_GB_PER_S]
    usual = [replicate_from(found, *way) for way in ways]
    for name in ("HOP_S", "NODE_HOP_S"):
        monkeypatch.setattr(links, name, getattr(links, name) / 2)
    halved = [replicate_from(found, *way) for way in ways]
    most = link_report.GPUS[-1]
    assert any(usual)
    assert halved == [n and (2 * n if 2 * n <= most else None) for n in usual]


def simulated_steps(seconds: str) -> tuple[str, str]:
    return r"(?<=Step time \(s\): )(0.8|1.5)0000", seconds


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        (BANDWIDTH, "1.125e-05", "1.0", "seconds do not grow"),
        (BANDWIDTH, "0.000135", "1.125e-05", "seconds do not grow"),
        (BANDWIDTH, r"Link: .*2\^20.*\n", "", "two sizes"),
        (BANDWIDTH, "1.125e-05", "0.0", "ZeroDivisionError"),
        (BANDWIDTH, "median_s", "m", "median_s"),
        (BANDWIDTH, "End: .*\n", "", "status is killed"),
        (BANDWIDTH, '"cuda"', '"cpu"', "2 cpu ranks"),
        (BANDWIDTH, '"cuda"', '"cuda", "tiny": true', "--tiny"),
        (BANDWIDTH, "nccl_environment", "n", "nccl_environment"),
        (BANDWIDTH, '"NCCL_NVLS_ENABLE"', '"NCCL_P2P_DISABLE"', "no transport"),
        (TRAINED, "completed", "out_of_memory", "status is out_of_memory"),
        (TRAINED, '"world_size": 2', '"world_size": 4', "4 cuda ranks"),
        (TRAINED, '"batch_size": 1', '"batch_size": 2', "batch_size"),
        (TRAINED, '"sequence_length": 4096', '"sequence_length": 2048', "sequence_length"),
        (TRAINED, '"bf16"', '"fp32"', "model_dtype"),
        (TRAINED, '"gradients_exchanged": true', '"x": true', "reduced in fp32"),
        (BANDWIDTH, '"method": 2', '"method": 1', "method"),
        (TRAINED, r"Step: (8|12|16) .*\n", "", "median"),
        (TRAINED, '"config": ', '"config": 3, "y": ', "int"),
        (TRAINED, '"scaling_factor": 10', '"scaling_factor": 1', "no shape"),
        (TRAINED, "NVIDIA H200", "NVIDIA H100", "'NVIDIA H100', .*but .*'NVIDIA H200'"),
        (TRAINED, '"torch": "2.11"', '"torch": "2.10"', "2.10"),
        (TRAINED, '"NCCL_NVLS_ENABLE": "0"', '"NCCL_NVLS_ENABLE": "1"', "'NCCL_NVLS_ENABLE': '1'"),
        (TRAINED, '"device"', '"y"', "device"),
        *((TRAINED, STEP_S, x, f"steps take .*{x}") for x in ("inf", "nan", "-1.5", "0.0")),
        (SIMULATED, "cuda", "cpu", "2 cpu ranks"),
        (SIMULATED, *simulated_steps("1.03000"), "slower than"),
        (SIMULATED, r"Step: (8|12|16) .*\n", "", "median"),
        (SIMULATED, *simulated_steps("0.00100"), "no time to compute"),
        (SIMULATED, '"model": ', '"model": 3, "y": ', "TypeError"),
    ],
)  # fmt: skip
def test_a_log_that_is_no_evidence_is_refused(
    tmp_path: Path, name: str, old: str, new: str, reason: str
) -> None:
    write_logs(tmp_path)
    rewrite(tmp_path / name, old, new)
    with pytest.raises(ValueError, match=rf"cannot be used: .*{reason}") as refused:
        link_section(tmp_path)
    assert name in str(refused.value)


def test_noise_between_two_runs_is_no_reason_to_refuse(tmp_path: Path) -> None:
    write_logs(tmp_path)
    rewrite(tmp_path / SIMULATED, *simulated_steps("1.01000"))
    assert "| 1010.0 |" in link_section(tmp_path)


@pytest.mark.parametrize("name", [BANDWIDTH, TRAINED, SIMULATED])
def test_two_logs_of_one_measurement_are_refused(tmp_path: Path, name: str) -> None:
    write_logs(tmp_path)
    (tmp_path / "later.out").write_bytes((tmp_path / name).read_bytes())
    with pytest.raises(ValueError, match=r"\.out cannot be used: .* is of the same"):
        link_section(tmp_path)


def test_a_named_pipe_is_no_log(tmp_path: Path) -> None:
    write_logs(tmp_path)
    section = link_section(tmp_path)
    os.mkfifo(tmp_path / "x.out")
    assert link_section(tmp_path) == section
