"""Does the model of exposed communication add up, and does the benchmark write what it reads?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from links import transport_of
from run_log import read_run

ROOT = Path(__file__).resolve().parent.parent


def test_the_benchmark_makes_the_logs_that_are_missing(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_links.py", "--output-dir", str(tmp_path)]
    options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "timeout": 400}
    command += ["--tiny", "--only", "sockets"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    assert done.stderr.count("status 0") == 2, done.stderr
    bandwidth, training = (read_run(path) for path in sorted(tmp_path.glob("*.out")))
    assert (bandwidth.status, training.status) == ("completed", "completed")
    assert training.steps[-1].step == 16
    assert {transport_of(run.run or {}) for run in (bandwidth, training)} == {"sockets on loopback"}
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
    (tmp_path / "sockets_on_loopback_all_1.out").unlink()
    done = subprocess.run(
        [*command, "--max-minutes", "0"], capture_output=True, text=True, check=True, **options
    )
    assert not (tmp_path / "sockets_on_loopback_all_1.out").exists()
    assert "status" not in done.stderr, "what is complete is not repeated, and time was out"
