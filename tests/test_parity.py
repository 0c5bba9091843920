"""Does FSDP compute what one process computes on the global batch, and would we notice if not?"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import World
from parity_cases import CASES, CONFIG, run_case

HERE = Path(__file__).resolve().parent
RANKS = {
    2: "plain accumulation no_reshard cpu_offload checkpointing empty_rank".split()
    + "selective compile compile_full compile_selective".split()
    + "reduced exchanged offloaded reduced_accumulation exchanged_accumulation".split()
    + "same_rows mean_of_means local_clipping".split(),
    3: ["plain"],
    4: "plain accumulation replicas checkpointing cpu_offload reduced exchanged".split(),
}
GOOD = [
    (n, name)
    for n, names in RANKS.items()
    for name in names
    if n != 3 and not CASES[name].fault and CASES[name].dtype == torch.float32
]


@cache
def reference(name: str) -> dict[str, Any]:
    """One process on the global batch, without FSDP, faults, or anything to shard."""
    torch.set_num_threads(1)
    return run_case("empty_rank" if CASES[name].empty_rank else "plain", World(torch.device("cpu")))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of all cases on each number of ranks: one start of torchrun for each."""
    folder = tmp_path_factory.mktemp("parity")
    loaded = {}
    for num_ranks, names in RANKS.items():
        out = folder / f"{num_ranks}.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_ranks), str(HERE / "parity_cases.py"), str(out)]
        done = subprocess.run(
            [*command, ",".join(names)], capture_output=True, text=True, timeout=120, cwd=HERE
        )
        assert done.returncode == 0, done.stderr[-4000:]
        loaded[num_ranks] = torch.load(out, weights_only=True)
    return loaded


def relative_gradient_error(result: dict[str, Any], name: str) -> float:
    """Largest ‖difference‖ / ‖gradient‖ over all parameters."""
    expected = reference(name)["gradients"]
    assert result["gradients"].keys() == expected.keys()
    return max(
        float((result["gradients"][key] - value).norm() / value.norm())
        for key, value in expected.items()
    )


def largest_trace_error(result: dict[str, Any], name: str) -> float:
    """Largest relative difference of losses and gradient norms over ten clipped AdamW steps."""
    expected = reference(name)
    return max(
        abs(ours - theirs) / theirs
        for trace in ("losses", "norms")
        for ours, theirs in zip(result[trace], expected[trace], strict=True)
    )


@pytest.mark.parametrize(("num_ranks", "name"), GOOD)
def test_gradients_equal_one_process(results: Any, num_ranks: int, name: str) -> None:
    assert relative_gradient_error(results[num_ranks][name], name) <= 1e-5


@pytest.mark.parametrize(("num_ranks", "name"), GOOD)
def test_clipped_adamw_trace_equals_one_process(results: Any, num_ranks: int, name: str) -> None:
    assert largest_trace_error(results[num_ranks][name], name) <= 1e-5
    # The limit is 0.5: without clipping at every step this would prove nothing about clipping.
    assert min(results[num_ranks][name]["norms"]) > 0.5


def test_planted_faults_are_caught(results: Any) -> None:
    """The same comparison, on runs that are wrong: gradients or traces must be far apart."""
    faulty = results[2]
    assert relative_gradient_error(faulty["same_rows"], "plain") > 0.1
    assert relative_gradient_error(faulty["mean_of_means"], "plain") > 1e-2
    assert largest_trace_error(faulty["local_clipping"], "plain") > 1e-2
    # Clipping does not touch the raw gradient: that comparison alone would have missed the fault.
    assert relative_gradient_error(faulty["local_clipping"], "plain") <= 1e-5


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_initial_weights_are_bit_equal(results: Any, num_ranks: int) -> None:
    for name in set(RANKS[num_ranks]) - {"empty_rank"}:
        for key, value in reference("plain")["initial"].items():
            rounded = value.to(CASES[name].dtype)
            assert torch.equal(results[num_ranks][name]["initial"][key], rounded), (name, key)


@pytest.mark.parametrize("more", ["", "_accumulation"])
def test_exchanged_gradients_are_those_of_a_reduction_in_fp32(results: Any, more: str) -> None:
    reduced, exchanged = (results[2][name + more] for name in ("reduced", "exchanged"))
    for key, value in reduced["gradients"].items():
        assert torch.equal(exchanged["gradients"][key], value), key
        assert torch.equal(exchanged["final"][key], reduced["final"][key]), key
    assert exchanged["losses"] == reduced["losses"]


def test_offloaded_gradients_and_updates_are_those_on_the_device(results: Any) -> None:
    here, away = (results[2][name] for name in ("exchanged", "offloaded"))
    for key, value in here["gradients"].items():
        assert torch.equal(away["gradients"][key], value), key
        assert torch.equal(away["final"][key], here["final"][key]), key


def test_exchanged_gradients_of_four_ranks_are_rounded_once(results: Any) -> None:
    reduced, exchanged = (results[4][name]["gradients"] for name in ("reduced", "exchanged"))
    for key, value in reduced.items():
        # fp32 sums in another order may round to the neighbour in bf16, rarely.
        difference = (exchanged[key].float() - value.float()).abs()
        assert (difference <= value.float().abs() * 2**-7).all(), key
        assert (difference > 0).float().mean() < 0.01, key


def test_references_really_train() -> None:
    trace = reference("plain")["losses"]
    assert trace[-1] < trace[0] - 0.05
    assert len(reference("plain")["initial"]) == 3 + 9 * CONFIG.n_layers
