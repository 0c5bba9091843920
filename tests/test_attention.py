"""Do the kernels for small heads compute attention? On a CPU, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_output_and_gradients_are_those_of_the_formula() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "tests/attention_cases.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 8
    for *case, found in cases:
        assert max(found) < 2e-5, (case, found)
