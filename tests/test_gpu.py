"""What only a GPU can show: graphs, compiled kernels, and that the host never waits for it."""

import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch
from test_scripts import TORCHRUN, finish, seconds_since_fault, start

import attention
import attention_cases
import job
from distributed import shard, sharded_world, single_world
from optimizer import CompiledAdamW
from run_log import RunLog, read_run
from step import clipped_update
from train_config import FSDPTrainConfig, TrainConfig, open_inputs
from trainer import build_model, materialize, running_job, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

CONFIG = TrainConfig(
    tokenizer_name_or_path="tests/data/tokenizer.json",
    sequence_length=256,
    batch_size=2,
    training_steps=12,
    learning_rate=1e-3,
    logging_frequency=6,
    collective_timeout_s=600,
)


SHARDED = FSDPTrainConfig(**dataclasses.asdict(CONFIG))


def run(tmp_path: Path, base: TrainConfig = CONFIG, **changes: object) -> RunLog:
    """The log of one run in this process."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.out"
    config = dataclasses.replace(base, log_file=path, **changes)
    inputs = open_inputs(config)
    in_world = sharded_world(1) if config.fsdp else single_world()
    with in_world as world, running_job(config, inputs, world) as job:
        model = build_model(config, inputs)
        if isinstance(config, FSDPTrainConfig):
            shard(model, world, config.sharding(inputs))
        materialize(model, config, world)
        train(model, job)
    return read_run(path)


def test_the_host_waits_at_log_steps_only(tmp_path: Path, monkeypatch) -> None:
    # Everything that waits for the GPU raises, except while a line is being logged.
    log = job.Meter.log

    def allowed(*arguments: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        log(*arguments)  # type: ignore[arg-type]
        torch.cuda.set_sync_debug_mode("error" if arguments[1] == 6 else "default")

    monkeypatch.setattr(job.Meter, "log", allowed)
    for graph in ("off", "on"):
        found = run(tmp_path, cuda_graph=graph)
        assert found.status == "completed", found.end


def test_graphs_compilation_and_checkpointing_change_no_loss(tmp_path: Path) -> None:
    losses = {}
    for name, changes in {
        "plain": {"compile": False, "cuda_graph": "off"},
        "compiled": {"cuda_graph": "off"},
        "graph": {"cuda_graph": "on"},
        "graph, selective": {"cuda_graph": "on", "activation_checkpointing": "selective"},
        "selective": {"cuda_graph": "off", "activation_checkpointing": "selective"},
        "full": {"cuda_graph": "off", "activation_checkpointing": "full"},
        "not compiled, selective": {"compile": False, "activation_checkpointing": "selective"},
    }.items():
        torch._dynamo.reset()
        found = run(tmp_path, compute_dtype="fp32", model_dtype="fp32", **changes)
        assert found.end is not None and found.end["compiled_after_first_step"] == 0
        losses[name] = torch.tensor([step.loss for step in found.steps])
    assert losses["plain"][0] - losses["plain"][-1] > 0.5
    for name, values in losses.items():
        torch.testing.assert_close(values, losses["plain"], rtol=2e-5, atol=0, msg=name)


def test_a_graph_holds_what_fsdp_does(tmp_path: Path) -> None:
    losses = []
    for graph in ("off", "on"):
        torch._dynamo.reset()
        found = run(tmp_path, SHARDED, cuda_graph=graph, compute_dtype="fp32", model_dtype="fp32",
                    grad_accumulation_steps=2)  # fmt: skip
        assert found.status == "completed", found.end
        losses.append(torch.tensor([step.loss for step in found.steps]))
    assert losses[0][0] - losses[0][-1] > 0.5
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)


def test_the_kernels_for_small_heads_compute_attention() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels for small heads are for Hopper")
    for case in attention_cases.CASES:
        for compiled in (False, True):
            torch._dynamo.reset()
            found = attention_cases.differences(
                case, device="cuda", dtype=torch.bfloat16, compiled=compiled
            )
            assert max(found) < 2e-2, (case, compiled, found)  # bf16 rounds to 4e-3
    assert attention.suits_small_heads(torch.zeros(1, 128, 2, 32, 1).bfloat16()[..., 0].cuda())


def test_compiled_adamw_equals_the_fused_one_on_large_weights() -> None:
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(torch.nn.Linear(1024, 4096, device="cuda", dtype=torch.bfloat16))
    ours = CompiledAdamW([models[0]], lr=1e-3)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=1e-3, fused=True)
    start = [parameter.clone() for parameter in models[0].parameters()]
    for _ in range(10):
        gradients = [torch.randn_like(p) for p in models[0].parameters()]
        for parameter, gradient in zip(models[1].parameters(), gradients, strict=True):
            parameter.grad = gradient
        clipped_update(ours, gradients, torch.tensor(2.0, device="cuda"))
        clipped_update(theirs, gradients, torch.tensor(2.0, device="cuda"))
    for mine, their, first in zip(*(m.parameters() for m in models), start, strict=True):
        moved = (their - first).float().norm()  # roundings of the last bit differ
        assert (mine - their).float().norm() <= 2e-2 * moved


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")


@needs_two_gpus
@pytest.mark.parametrize("fault", ["kill", "out_of_memory", "stop", "exception"])
def test_the_fault_of_one_gpu_ends_the_job_and_frees_both(fault: str, tmp_path: Path) -> None:
    flags = (
        "--scaling-factor 2 --batch-size 1 --training-steps 500 --logging-frequency 1 "
        "--cuda-graph off --collective-timeout-s 30"  # a replayed graph allocates nothing
    )
    before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    script = ["tests/faulty_train.py", fault, "train_fsdp.py", *flags.split()]
    code, out, err = finish(start([*TORCHRUN, "2", *script]), timeout_s=200)
    seconds = seconds_since_fault(err)
    time.sleep(2)
    lost_gib = [(free - torch.cuda.mem_get_info(gpu)[0]) / 2**30 for gpu, free in enumerate(before)]
    (tmp_path / f"{fault}.out").write_text(out)
    log = read_run(tmp_path / f"{fault}.out")
    print(f"{fault}: status {code} {seconds:.1f} s after the fault, End: {log.end}")
    print(f"memory that is not free again: {lost_gib[0]:.2f} and {lost_gib[1]:.2f} GiB")
    assert code == 1 and seconds < (90 if fault == "stop" else 60) and max(lost_gib) < 0.1
    expected = {"out_of_memory": ("out_of_memory",), "kill": ("failed", "killed")}
    assert log.status in expected.get(fault, ("failed",)), log.end


@pytest.mark.parametrize("update", ["adamw", "sgd"])
def test_sharding_over_two_ranks_changes_no_bit(update: str, tmp_path: Path) -> None:
    # Gradients of two ranks have one sum, whoever adds them; nothing is clipped, since the norm of
    # two shards is added up in another order than that of the whole.
    flags = (
        "--scaling-factor 2 --sequence-length 1024 --batch-size 4 --training-steps 12 "
        "--logging-frequency 1 --lr-warmup-steps 2 --grad-max-norm 1000 --deterministic "
        "--cuda-graph off "  # a graph's rate is a number in fp32
    )
    flags += "--learning-rate " + {"adamw": "6e-4", "sgd": "0.125"}[update]
    ways = {"default": "", "offload": "--cpu-offload"}
    if update == "adamw":
        ways |= {"again": "", "gathered": "--no-reshard-after-forward", "replicas": "--replicas 2"}
    runs = {}
    for name, way in ways.items():
        own = ["tests/exact_train.py", update, "train_fsdp.py", *flags.split(), *way.split()]
        own += ["--log-file", str(tmp_path / f"{name}.out")]
        code, _, err = finish(start([*TORCHRUN, "2", *own]), timeout_s=200)
        assert code == 0, err[-2000:]
        runs[name] = read_run(tmp_path / f"{name}.out")
    losses = {name: [step.loss for step in run.steps] for name, run in runs.items()}
    digests = {name: (run.end or {})["digest"]["parameters"] for name, run in runs.items()}
    print(update, losses)
    assert losses["default"][0] - losses["default"][-1] > 0.1
    for name in ways.keys() - ({"offload"} if update == "adamw" else set()):
        assert losses[name] == losses["default"] and digests[name] == digests["default"], name
    # The CPU's AdamW rounds some weights to their neighbours.
    assert losses["offload"][0] == losses["default"][0]
    torch.testing.assert_close(losses["offload"], losses["default"], rtol=2e-4, atol=0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
