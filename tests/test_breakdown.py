"""Is a step's time given to the kind of work that it went to, and each moment only once?"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from breakdown import KINDS, Interval, kind_of, seconds_by_kind, shares_of_step
from run_log import read_run

ROOT = Path(__file__).resolve().parent.parent
PROFILES = sorted((ROOT / "logs" / "published").rglob("profile_*.txt"))
MATMUL, ATTENTION, NCCL = "nvjet_sm90_tst", "cudnn_sdpa_sm90_flash_fprop", "ncclDevKernel_AllGather"
COPY, SILU = "Memcpy DtoD", "triton_poi_fused_mul_silu_4"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<cutlass::half_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_splitK_NNT", "matmuls"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmuls"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmuls"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matmuls"),
        ("aten::mm", "matmuls"),
        ("aten::addmm", "matmuls"),
        ("aten::bmm", "matmuls"),
        ("triton_red_fused__to_copy_arange_clamp_eq_exp_logsumexp_mul_ne_sub_unsqueeze_0", "loss"),
        ("triton_red_fused__to_copy_clamp_gather_logsumexp_mul_ne_sub_sum_unsqueeze_1", "loss"),
        ("triton_poi_fused__to_copy_add_cat_mul_neg_slice_3", "norm and elementwise"),
        ("triton_per_fused__fused_rms_norm__unsafe_view_add_3", "norm and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<8, FillFunctor>", "norm and elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMeta>", "optimizer"),
        ("void at::native::lpnorm_cleanup<c10::BFloat16>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("triton_poi_fused__to_copy_add_copy_copy__div_lerp_mul_sqrt_sub_3", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("gloo:all_reduce", "communication"),
        ("Memset (Device)", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float>", "copies"),
        ("void at::native::(anonymous namespace)::split_with_sizes_copy_out_kernel", "copies"),
        ("void at::native::elementwise_kernel<bfloat16_copy_kernel_cuda>", "copies"),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_of_our_own_are_told_by_their_names() -> None:
    source = ast.parse((ROOT / "attention_triton.py").read_text())
    started = {
        call.func.value.id
        for call in ast.walk(source)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Subscript)
        and isinstance(call.func.value, ast.Name)
    }
    assert len(started) == 2
    assert {kind_of(name) for name in started} == {"attention"}


def test_published_profiles_are_understood() -> None:
    """Matmuls and attention hold most of the kernel time; little is left to "elementwise"."""
    assert PROFILES
    for path in PROFILES:
        lines = re.findall(r"^([\d.]+) ms  x\d+  (.*)$", path.read_text(), re.MULTILINE)
        total_ms = dict.fromkeys(KINDS, 0.0)
        for milliseconds, name in lines:
            if "#" not in name:  # a range that bears a name, not a kernel
                total_ms[kind_of(name)] += float(milliseconds)
        shares = {kind: value / sum(total_ms.values()) for kind, value in total_ms.items()}
        assert shares["matmuls"] + shares["attention"] > 0.75, (path.name, shares)
        assert 0.005 < shares["optimizer"] < 0.08, (path.name, shares)
        assert 0.001 < shares["loss"] < 0.12, (path.name, shares)
        assert 0.03 < shares["norm and elementwise"] < 0.15, (path.name, shares)


def seconds(*intervals: tuple[str, float, float], wall_s: float = 10.0) -> dict[str, float]:
    """What is not zero, with times given in seconds."""
    found = seconds_by_kind((Interval(n, a * 1e6, b * 1e6) for n, a, b in intervals), wall_s)
    assert tuple(found) == KINDS
    return {kind: round(value, 9) for kind, value in found.items() if value}


def test_each_moment_counts_once() -> None:
    assert seconds() == {"idle": 10}
    assert seconds((MATMUL, 1, 3), (SILU, 4, 5)) == {
        "matmuls": 2, "norm and elementwise": 1, "idle": 7,
    }  # fmt: skip
    assert seconds((MATMUL, 1, 3), (MATMUL, 2, 4)) == {"matmuls": 3, "idle": 7}
    assert seconds((MATMUL, 0, 10), (ATTENTION, 2, 3)) == {"attention": 1, "matmuls": 9}
    # Both at once at an edge, in any order, and an interval of no length.
    assert seconds((MATMUL, 3, 4), (MATMUL, 2, 3), (SILU, 3, 3)) == {"matmuls": 2, "idle": 8}


def test_only_exposed_communication_counts() -> None:
    assert seconds((NCCL, 0, 4), (MATMUL, 1, 3)) == {"communication": 2, "matmuls": 2, "idle": 6}
    assert seconds((NCCL, 1, 3), (MATMUL, 0, 4)) == {"matmuls": 4, "idle": 6}
    assert seconds((NCCL, 0, 4), (COPY, 3, 6)) == {"communication": 4, "copies": 2, "idle": 4}


def test_nothing_is_idle_when_kernels_outlast_the_clock() -> None:
    assert seconds((MATMUL, 0, 12)) == {"matmuls": 12}


def test_shares_of_a_step_that_was_not_profiled() -> None:
    busy = dict.fromkeys(KINDS, 0.0) | {"matmuls": 0.2, "attention": 0.1, "idle": 0.7}
    record = {"seconds_per_step": busy, "wall_s_per_step": 1.0}
    assert shares_of_step(record, None)["idle"] == pytest.approx(0.7)
    faster = shares_of_step(record, 0.4)
    assert (faster["matmuls"], faster["idle"]) == pytest.approx((0.5, 0.25))
    full = shares_of_step(record, 0.1)  # kernels need 0.3 s: this clock cannot be
    assert (full["matmuls"], full["idle"]) == pytest.approx((2 / 3, 0))


def test_a_profiled_training_says_where_its_time_went(tmp_path: Path) -> None:
    flags = (
        "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --profile "
        "--training-steps 4 --profile-step-start 2 --profile-step-end 3 --model-dtype fp32 "
        f"--no-digest --profile-dir {tmp_path} --log-file {tmp_path}/job.out"
    )
    done = subprocess.run(
        [sys.executable, "train.py", *flags.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "job.out")
    assert run.status == "completed"
    [record] = run.breakdowns
    assert (tmp_path / "trace-rank0.json").exists()
    assert (record["first_step"], record["num_steps"]) == (2, 2)
    assert tuple(record["shares"]) == KINDS
    assert sum(record["shares"].values()) == pytest.approx(1)
    assert sum(record["seconds_per_step"].values()) == pytest.approx(record["wall_s_per_step"])
    for kind in ("matmuls", "attention", "optimizer", "loss", "norm and elementwise"):
        assert record["seconds_per_step"][kind] > 0, kind
    assert record["shares"]["matmuls"] > record["shares"]["loss"]
    assert record["shares"]["communication"] == 0
    largest = record["largest_kernels"]
    assert 5 < len(largest) <= 20
    assert list(largest.values()) == sorted(largest.values(), reverse=True)
    assert {"aten::mm", "attention"} & {*largest, *map(kind_of, largest)} == {
        "aten::mm",
        "attention",
    }
    assert 0 < largest["aten::mm"] <= record["seconds_per_step"]["matmuls"] * (1 + 1e-9)
