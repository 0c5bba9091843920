"""What is the dense bf16 peak of this GPU, and how little work leaves it waiting for the CPU?

The peak is keyed by the exact name that the driver reports: a guess from part of a name makes every
MFU wrong.
"""

# Below this much arithmetic a micro-batch ends before the CPU has launched its kernels: about half
# of it took as long to launch as to compute on an H200, all of it under FSDP, with its hooks.
LAUNCH_BOUND_FLOPS = 1.5e14

# Dense (no sparsity) bf16 tensor-core peak in TFLOP/s, from the vendor's datasheets.
PEAK_BF16_TFLOPS: dict[str, float] = {
    "NVIDIA H100 80GB HBM3": 989.0,  # SXM
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.0,  # SXM
    "NVIDIA H200 NVL": 836.0,
    "NVIDIA GH200 120GB": 989.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA B200": 2250.0,
}


def is_graphed_by_default(
    microbatch_flops: float, *, fsdp: bool, compiled: bool, replicas: int, cpu_offload: bool
) -> bool:
    """Whether a step on a GPU is one CUDA graph where nobody asks for it, or against it.

    Under FSDP only what was run so: compiled blocks, one replica, nothing offloaded.
    """
    was_run = not fsdp or (compiled and replicas == 1 and not cpu_offload)
    return was_run and microbatch_flops < LAUNCH_BOUND_FLOPS


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s, or None for a device that the table does not name."""
    return PEAK_BF16_TFLOPS.get(device_name)
