"""Does the model of exposed communication add up, and does the benchmark write what it reads?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from links import transport_of
from run_log import read_run

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
