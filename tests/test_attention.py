"""Do the kernels for small heads compute attention? On a CPU, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attention

ROOT = Path(__file__).resolve().parent.parent


# (tokens, heads) of queries, keys and values.
@pytest.mark.parametrize(
    "shapes",
    [
        ((64, 2), (64, 2), (64, 2)),
        ((128, 3), (128, 2), (128, 2)),
        ((128, 2), (256, 2), (256, 2)),
        ((128, 2), (128, 2), (128, 1)),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(shapes: tuple[tuple[int, int], ...]) -> None:
    pytest.importorskip("triton")
    import attention_triton

    with pytest.raises(ValueError, match="do not go together"):
        attention_triton.forward(*(torch.zeros(1, *shape, 32) for shape in shapes))


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


def test_deterministic_runs_take_no_kernel_that_adds_in_any_order(monkeypatch) -> None:
    monkeypatch.setattr(attention, "_is_hopper_with_triton", lambda: True)
    queries: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 256, 4, 32)
    )
    assert attention.suits_small_heads(queries)
    torch.use_deterministic_algorithms(True)
    try:
        assert not attention.suits_small_heads(queries)
    finally:
        torch.use_deterministic_algorithms(False)
