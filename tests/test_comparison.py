"""Does the comparison with the earlier implementation say what its logs and ours say?"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_plots import SEED_LOGS, SHARDED, needs_seed_logs, shares
from test_plots import write as write  # the fixture

from analysis import facts, load_runs, mean_metrics
from comparison import (
    ORIGINAL,
    at_batch_1,
    checkpointing_rows,
    cost_summary,
    findings,
    read_original,
    read_points,
    scaling_section,
)

Write = Callable[..., Path]
H200 = "h200/scaling/"
_ONE_BY_ONE = "kernels launched one by one"


@needs_seed_logs
def test_original_holds_every_older_log() -> None:
    stored = pd.read_csv(ORIGINAL).set_index("log")
    runs, _ = load_runs(SEED_LOGS)
    assert len(runs) == len(stored) == 21
    for run in runs:
        row: Any = stored.loc[run.path.relative_to(SEED_LOGS).as_posix()]
        what = facts(run)
        how = mean_metrics(run, skip_steps=0 if "all logged" in row.source else None)
        for name in ("strategy", "factor", "num_parameters", "fsdp", "gpus", "status"):
            assert row[name] == getattr(what, name), (row.name, name)
        columns = {
            "tokens_per_s": how.tokens_per_s, "training_tokens_pct": how.training_tokens_pct,
            "mfu_pct_as_logged": how.mfu_pct_as_logged, "mfu_pct_from_config": how.mfu_pct,
            "tflops_as_logged": how.tflops_as_logged, "tflops_from_config": how.tflops,
        }  # fmt: skip
        for name, value in columns.items():
            stored_value = None if pd.isna(row[name]) else row[name]
            assert stored_value == pytest.approx(value, abs=0.00501), (row.name, name)
    assert set(stored["log_is_public"]) == {"no"}
    assert "published as factor 2" in stored.loc["train_fsdp/lsai-460981.out", "source"]


def row_of(text: str, *cells: str) -> list[str]:
    """The cells of the one row that begins with these."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    [found] = [row for row in rows if row[: len(cells)] == list(cells)]
    return found


def write_study(write: Write) -> None:
    for factor, speed in ((2, 142_265.64), (8, 20_000.0)):
        write([1.0, 1.0, speed], name=f"{H200}{factor}.out", factor=factor)
        write([1.0, 1.0, 0.8 * speed], name=f"{H200}{factor}_fsdp.out", factor=factor, **SHARDED)
    write([], name=f"{H200}12.out", factor=12, status="out_of_memory")
    # None of these is how the original ran.
    write([1.0, 1.0, 284_531.28], name=f"{H200}batch.out", flags={"batch_size": 8})
    flags = {"cpu_offload": True}
    write([1.0, 1.0, 9e9], name=f"{H200}offload.out", flags=flags, **SHARDED)


def test_sizes_stand_side_by_side(write: Write, tmp_path: Path) -> None:
    write_study(write)
    text = scaling_section(tmp_path / "logs")
    small = row_of(text, "`all` 2", "190,857,728", "no", "1", "71,133")
    assert small[3:] == ["1", "71,133", "8.24", "1", "142,266", "16.47", "2.00"]
    assert row_of(text, "`all` 2", "190,857,728", "yes")[3:8] == [
        "2", "34,006", "3.94", "1", "113,813",
    ]  # fmt: skip
    assert row_of(text, "`all` 8", "3,959,687,168", "yes")[3:6] == ["–", "not run", "–"]
    assert row_of(text, "`all` 12")[6:] == ["1", "out of memory", "–", "n/a"]
    assert row_of(text, "`all` 10", "7,329,958,400", "yes", "16 (n=2)")[4] == "2,215"
    assert "9,000,000,000" not in text
    for words in (
        "published with an MFU of 6.08 % has 25.09 %",
        "up to `all` 14 and ran out of memory at `all` 15 on 4 GPUs and `all` 20 on 16 GPUs",
        "trains up to `all` 8 without FSDP and up to `all` 8 with it",
        "it left 36 to 48 % of the tokens/s of one GPU without it; on one GPU here, with nothing "
        "offloaded, 80 %",
        "its peak differs by +0.0 to +0.0 GiB",
        "reserves up to 6.0 GiB more than is allocated at once",
        "of whose positions 22 to 28 % are training tokens",
        "NVIDIA H200, torch 2.11, against",
    ):
        assert words in text, words
    assert "profile" not in text


def test_larger_batches_stand_in_a_table_of_their_own(write: Write, tmp_path: Path) -> None:
    write_study(write)
    write([1.0, 1.0, 40_000.0], name=f"{H200}8b.out", factor=8, flags={"batch_size": 5})
    write([], name=f"{H200}8c.out", factor=8, flags={"batch_size": 6}, status="out_of_memory")
    text = scaling_section(tmp_path / "logs")
    found = row_of(text, "`all` 8", "3,959,687,168", "no", "1", "5")
    assert found[5:] == ["40,000", "115.63", "2.00", "60.0"]
    assert row_of(text, "`all` 2", "190,857,728", "no", "1", "8")[7] == "2.00"
    assert "| 6 |" not in text
    # The speed of batch 1 is compared with that of the same settings alone.
    write(
        [1.0, 1.0, 9.0], name=f"{H200}8d.out", factor=8, flags={"batch_size": 4, "compile": False}
    )
    text = scaling_section(tmp_path / "logs")
    assert row_of(text, "`all` 8", "3,959,687,168", "no", "1", "4")[7] == "n/a"
    write(
        [1.0, 1.0, 9.0], name=f"{H200}8e.out", factor=8, flags={"batch_size": 5, "compile": False}
    )
    with pytest.raises(ValueError, match="strategy all, factor 8, FSDP False, GPUs 1, batch 5"):
        scaling_section(tmp_path / "logs")


def test_checkpointing_stands_beside_the_same_without_it(write: Write, tmp_path: Path) -> None:
    write_study(write)
    before = scaling_section(tmp_path / "logs")
    full = {"activation_checkpointing": "full"}
    write([1.0, 1.0, 12_000.0], name=f"{H200}8_full.out", factor=8, flags=full, **SHARDED)
    write([1.0, 1.0, 3_000.0], name=f"{H200}12_full.out", factor=12, flags=full)
    write([], name=f"{H200}14_full.out", factor=14, flags=full, status="out_of_memory")
    # Of an older log nobody knows; and the same without it is compiled as well.
    write([1.0, 1.0, 1.0], name=f"{H200}4.out", flags={"activation_checkpointing": None})
    write([1.0, 1.0, 1.0], name=f"{H200}2_plain.out", factor=2, flags=full | {"compile": False})
    text = scaling_section(tmp_path / "logs")
    sizes = {8: "3,959,687,168", 12: "12,281,515,008", 14: "19,128,929,792"}
    rows = {
        size: row_of(text, f"`all` {size}", number, "yes" if size == 8 else "no", "1", "1")[4:]
        for size, number in sizes.items()
    }
    assert rows[8] == ["1", "full", "12,000", "34.69", "60.0", "16,000", "46.25", "60.0"]
    assert rows[12][1:3] + rows[12][4:] == ["full", "3,000", "60.0", "out of memory", "–", "–"]
    assert row_of(text, "`all` 2", "190,857,728", "no", "1", "1")[9] == "not run"
    assert rows[14] == ["1", "full", "out of memory", "–", "–", "not run", "–", "–"]
    two = {"world_size": 2, **SHARDED}
    for name, speed, own in (("a", 1000.0, {}), ("b", 700.0, {"replicas": 2})):
        write([1.0, 1.0, speed], name=f"{H200}9{name}.out", factor=9, **two, **own)
        write([1.0, 1.0, speed - 100], name=f"{H200}9{name}_full.out", factor=9, flags=full,
              **two, **own)  # fmt: skip
    several = scaling_section(tmp_path / "logs")
    assert row_of(several, "`all` 9", "5,530,523,904", "yes", "2", "1", "full")[9] == "1,000"
    replicas = row_of(several, "`all` 9", "5,530,523,904", "yes", "2, `--replicas 2`", "1", "full")
    assert (replicas[6], replicas[9]) == ("600", "700")
    head = "With checkpointing of activations"
    assert text.replace(text[text.index(head) :], "").strip() == before.strip()


def test_checkpointing_is_held_against_what_trained(write: Write, tmp_path: Path) -> None:
    full, logs = {"activation_checkpointing": "full"}, tmp_path / "logs"
    write([1.0, 1.0, 8.0], name=f"{H200}full.out", flags=full)
    write([], name=f"{H200}a.out", status="out_of_memory")
    write([1.0, 1.0, 16.0], name=f"{H200}b.out")

    def rows() -> list[str]:
        runs = load_runs(logs)[0]
        return checkpointing_rows(read_points(runs, checkpointed=True), read_points(runs))

    assert rows()[0].split(" | ")[-3] == "16"
    other = write([1.0, 1.0, 9.0], name=f"{H200}fp32.out", flags={"model_dtype": "fp32", **full})
    with pytest.raises(ValueError, match="compete for one row: strategy all, factor 2, FSDP False"):
        rows()
    other.unlink()
    write([1.0, 1.0, 9.0], name=f"{H200}c.out", flags={"packed": True})
    with pytest.raises(ValueError, match="compete for one row: strategy all, factor 2, FSDP False"):
        rows()


def test_findings_do_not_depend_on_chance(write: Write, tmp_path: Path) -> None:
    write_study(write)
    lines = findings(read_original(), read_points(load_runs(tmp_path / "logs")[0]))
    [near] = [line for line in lines if line.startswith("**Near the limit")]
    assert "6.0 GiB more than is allocated at once (`all` 2, whose gradients take 0.4)" in near
    write([1.0, 1.0, 9.0], name=f"{H200}19.out", factor=19, world_size=16, **SHARDED)
    for name, factor in ((f"{H200}1_fsdp.out", 1), (f"{H200}9_fsdp.out", 9)):
        log = write([1.0, 1.0, 9.0], name=name, factor=factor, **SHARDED)
        log.write_text(re.sub(r" \| Peak.*", "", log.read_text()))
    write([1.0, 1.0, 9.0], name=f"{H200}n.out", flags={"scaling_strategy": "n_layers"}, factor=1)
    flags = {"scaling_strategy": "n_layers"}
    log = write([1.0, 1.0, 9.0], name=f"{H200}nf.out", flags=flags, factor=1, **SHARDED)
    log.write_text(
        log.read_text().replace("Peak memory (GiB): 60.000", "Peak memory (GiB): 64.000")
    )
    again = findings(read_original(), read_points(load_runs(tmp_path / "logs")[0]))
    assert near in again
    text = " ".join(again)
    assert "up to `all` 9 with it" in text
    assert "differs by +0.0 to +4.0 GiB" in text


def test_costs_are_of_the_same_settings(write: Write, tmp_path: Path) -> None:
    write([1.0, 1.0, 9_000.0], name=f"{H200}12.out", factor=12)
    write([1.0, 1.0, 10_000.0], name=f"{H200}8.out", factor=8)
    write([1.0, 1.0, 7_000.0], name=f"{H200}8f.out", factor=8, **SHARDED)
    write([1.0, 1.0, 50_000.0], name=f"{H200}4.out", factor=4)
    flags = {"compile": False}
    write([1.0, 1.0, 5_000.0], name=f"{H200}4f.out", factor=4, flags=flags, **SHARDED)
    write([1.0, 1.0, float("nan")], name=f"{H200}2.out", status="killed")
    write([1.0, 1.0, 9.0], name=f"{H200}2f.out", **SHARDED)
    costs = cost_summary(tmp_path / "logs")
    assert costs["row"].factor == 12 and not costs["several"]
    assert (costs["low"], costs["high"]) == (70, 70)
    text = scaling_section(tmp_path / "logs")
    assert "with nothing offloaded, 70 %" in text
    assert row_of(text, "`all` 2", "190,857,728", "no")[6] == "1 †"
    flags = {"batch_size": 4}
    write([1.0, 1.0, 9.0], name=f"{H200}b.out", flags=flags, world_size=2, **SHARDED)
    assert not cost_summary(tmp_path / "logs")["several"], "nothing to hold it to"


def test_the_same_number_of_gpus_is_preferred(write: Write, tmp_path: Path) -> None:
    write_study(write)
    write([1.0, 1.0, 68_012.0], name=f"{H200}two.out", world_size=2, **SHARDED)
    text = scaling_section(tmp_path / "logs")
    assert row_of(text, "`all` 2", "190,857,728", "yes", "2")[6:] == ["2", "68,012", "7.87", "2.00"]
    assert row_of(text, "`all` 2", "190,857,728", "yes", "–")[6] == "1"


def test_several_gpus_are_held_against_one_without_fsdp(write: Write, tmp_path: Path) -> None:
    write_study(write)
    two, batch, off = {"world_size": 2, **SHARDED}, {"batch_size": 4}, {"cuda_graph": "off"}
    write([1.0, 1.0, 15_000.0], name=f"{H200}8_two.out", factor=8, **two)
    write([1.0, 1.0, 10_000.0], name=f"{H200}8_off.out", factor=8, flags=off, **two)
    write([1.0, 1.0, 18_000.0], name=f"{H200}8_4.out", factor=8, flags=batch, **two)
    write([1.0, 1.0, 9_000.0], name=f"{H200}9.out", factor=9, flags=batch, **two)
    write([1.0, 1.0, 24_000.0], name="h200/bench/8_4.out", factor=8, flags=batch)
    write([1.0, 1.0, 99_000.0], name="h200/bench/8.out", factor=8)
    text = scaling_section(tmp_path / "logs")
    found = [row_of(text, "`all` 8", "2", "1", way) for way in ("by default", _ONE_BY_ONE)]
    assert [row[4:8] for row in found] == [["15,000", "43.36", "20,000", "75.0"],
                                           ["10,000", "28.91", "20,000", "50.0"]]  # fmt: skip
    assert row_of(text, "`all` 8", "2", "4", "by default")[6:8] == ["24,000", "75.0"]
    assert row_of(text, "`all` 9", "2", "4", "by default")[6:8] == ["n/a", "n/a"]
    several = cost_summary(tmp_path / "logs")["several"]
    assert "leaves 75 % of one GPU without it by default, and up to 75 % (`all` 8 at" in several
    write([1.0, 1.0, 19_000.0], name=f"{H200}8_kept.out", factor=8, **two,
          flags={"reshard_after_forward": False})  # fmt: skip
    write(
        [1.0, 1.0, 9_000.0], name=f"{H200}8_reduced.out", factor=8, gradients_exchanged=False, **two
    )
    several = cost_summary(tmp_path / "logs")["several"]
    assert "by default, and up to 95 % (`all` 8 at batch 1 with `--no-reshard" in several
    text = scaling_section(tmp_path / "logs")
    # 19,000 tokens/s and 15,000; both at a peak of 60 GiB.
    assert "27 % more tokens/s on several GPUs (`all` 8), for 0 GiB more of each" in text
    for way in ("`--no-reshard-after-forward`", "gradients reduced in fp32"):
        assert row_of(text, "`all` 8", "2", "1", way)
    (tmp_path / "logs" / f"{H200}8_two.out").unlink()
    for name in ("reduced", "off"):
        (tmp_path / "logs" / f"{H200}8_{name}.out").unlink()
    assert "| 2, `--no-reshard-after-forward` | 19,000 |" in scaling_section(tmp_path / "logs")
    # What was launched otherwise, or has other settings, or no speed, is nobody's base.
    write([1.0, 1.0, 10.0], name=f"{H200}8_slow.out", factor=8, flags=off)
    flags = {"compile": False, "batch_size": 4}
    write([1.0, 1.0, 9.0], name=f"{H200}8_plain.out", factor=8, flags=flags)
    write([1.0, 0.0, 0.0], name="h200/bench/9_4.out", factor=9, flags=batch)
    assert cost_summary(tmp_path / "logs")["several"] == several
    assert row_of(scaling_section(tmp_path / "logs"), "`all` 9", "2", "4")[6:8] == ["n/a", "n/a"]


def test_what_launching_one_by_one_leaves(write: Write, tmp_path: Path) -> None:
    write_study(write)
    for factor, speed in ((2, 14_226.564), (8, 10_000.0)):
        name, flags = f"{H200}{factor}_off.out", {"cuda_graph": "off"}
        write([1.0, 1.0, speed], name=name, factor=factor, flags=flags, **SHARDED)
    text = scaling_section(tmp_path / "logs")
    assert "one by one they leave 10 to 50 % of the tokens/s (`all` 2 to 8)" in text
    assert "`all` 1" not in text.split("**Launching")[1].split("\n")[0]
    assert "the same steps leave 80 %" in text and "offloaded, 80 %" in text


def test_profiles_say_why(write: Write, tmp_path: Path) -> None:
    write_study(write)
    for name, factor, flags in (
        ("2", 2, {}), ("8", 8, {}), ("n", 1, {"scaling_strategy": "n_layers"})
    ):  # fmt: skip
        path = f"{H200}profile_{name}.out"
        kinds = shares(matmuls=1.0, attention=0.5 * factor / 2, loss=0.1)
        write([2048.0] * 3, name=path, factor=factor, flags=flags | {"profile": True},
              breakdown=kinds)  # fmt: skip
    text = scaling_section(tmp_path / "logs")
    # 6·(190,857,728 - 131,072·512) FLOPs for each of 4096 tokens a second in matmuls
    assert "take 75 % of a step of `all` 2 without FSDP, at 3 and 3 TFLOP/s" in text
    assert "attention is 23 % of its FLOPs" in text and "and 12 % of those of `n_layers`" in text
    assert "heads 32 wide" in text and "heads 128 wide" in text
    profiled = {"factor": 10, "breakdown": shares(matmuls=9.0, attention=9.0)}
    for number, flags in enumerate(({"activation_checkpointing": "full"}, {"batch_size": 2},
                                    {"compile": False}, {"cuda_graph": "on"})):  # fmt: skip
        write([2048.0] * 3, name=f"{H200}{number}.out", flags=flags | {"profile": True}, **profiled)
    write([2048.0] * 3, name=f"{H200}nothing.out", factor=10, flags={"profile": True},
          breakdown=shares(loss=1.0))  # fmt: skip
    again = scaling_section(tmp_path / "logs")
    assert [s in again for s in text.splitlines() if "**Why" in s] == [True, True]
    write([2048.0] * 3, name=f"{H200}h100.out", flags={"profile": True}, device="H100", **profiled)
    assert "**Why" not in scaling_section(tmp_path / "logs"), "two kinds of device"


def test_profiled_runs_explain(write: Write, tmp_path: Path) -> None:
    write_study(write)
    flags, name = {"profile": True}, f"{H200}profile.out"
    write([2048.0] * 3, name=name, flags=flags, breakdown=shares(matmuls=1.5))
    text = scaling_section(tmp_path / "logs")
    row = row_of(text, "`all` 2", "1 GPU, no FSDP", "1")
    assert row[3:] == ["0.0", "0.0", "75.0", "0.0", "0.0", "0.0", "0.0", "25.0",
                       "2000.0", "1,234", "profile.out"]  # fmt: skip


def test_nothing_before_there_are_logs(write: Write, tmp_path: Path) -> None:
    assert scaling_section(tmp_path / "logs") == ""
    write([], name=f"{H200}2.out", status="failed")
    assert "not run" in scaling_section(tmp_path / "logs")
    (tmp_path / "logs" / H200 / "bad.out").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"bad\.out cannot be used"):
        scaling_section(tmp_path / "logs")


def test_ambiguous_runs_are_refused(write: Write, tmp_path: Path) -> None:
    write([1.0, 1.0, 5.0])
    write([1.0, 1.0, 7.0], flags={"compile": False})
    with pytest.raises(ValueError, match="strategy all, factor 2, FSDP False, GPUs 1"):
        at_batch_1(read_points(load_runs(tmp_path / "logs")[0]))


def test_findings_without_runs_of_ours() -> None:
    lines = findings(read_original(), [])
    assert [line.split(".**")[0] for line in lines] == ["**MFU", "**The wall"]
