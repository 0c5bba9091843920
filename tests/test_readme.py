"""Does README.md say what the logs, the code and the Makefile say?"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib.image import imread

import figures

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLISHED = ROOT / "logs" / "published"
# Where the flags of a script are defined.
CONFIG_CLASSES = {
    "train.py": ("train_config", "TrainConfig"),
    "train_fsdp.py": ("train_config", "FSDPTrainConfig"),
    "loss_ablation.py": ("loss_ablation", "AblationConfig"),
    "plots.py": ("plots", "PlotsConfig"),
    "figures.py": ("figures", "FiguresConfig"),
    "memory.py": ("memory", "FitConfig"),
    "load_model_no_fsdp.py": ("search", "SearchConfig"),
}
TREE = re.search(r"## What is where\n\n```\n(.*?)```", README, re.DOTALL)


def prose(text: str) -> str:
    """The text without its generated blocks."""
    return re.sub(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)


def measurements(text: str) -> list[str]:
    """Numbers with the unit of something that a run measures."""
    unit = r"\s*(?:%|GiB|GB|TFLOP|tokens/s|tokens per second)"
    return re.findall(rf"\d[\d.,]*{unit}", text)


def commands(text: str) -> list[str]:
    """Lines of the shell blocks, continued ones joined, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines]


def test_blocks_are_fresh() -> None:
    _, stale = figures.render(README, PUBLISHED)
    assert not stale, "run make figures"


def test_a_stale_block_is_found_and_mended(tmp_path: Path) -> None:
    number = "| 256 | 8 | 8 | 75,501,824 |"
    assert README.count(number) == 1
    readme = tmp_path / "README.md"
    readme.write_text(README.replace(number, number.replace("824", "825")), encoding="utf-8")
    command = [sys.executable, "figures.py", "--readme", str(readme)]
    check = [*command, "--check"]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    stale = subprocess.run(check, **options)
    assert stale.returncode == 1
    assert "stale: model-sizes" in stale.stderr
    assert number not in readme.read_text(encoding="utf-8"), "--check changes nothing"
    subprocess.run(command, check=True, **options)
    assert readme.read_text(encoding="utf-8") == README
    assert subprocess.run(check, **options).returncode == 0
    for figure in (figures.WHAT_FITS_FIGURE, figures.LOSS_FIGURE):
        drawn, published = (imread(folder / figure) for folder in (tmp_path, ROOT))
        assert drawn.shape == published.shape and (drawn == published).all(), "run make figures"


@pytest.mark.parametrize(
    "damage",
    [
        ("<!-- end model-sizes -->\n", ""),
        ("<!-- begin model-sizes -->\n", ""),
        ("<!-- begin model-sizes -->", "<!-- begin another -->"),
        ("<!-- end model-sizes -->", "<!-- end model-sizes -->\n<!-- end model-sizes -->"),
    ],
)
def test_damaged_markers_are_refused(damage: tuple[str, str]) -> None:
    with pytest.raises(ValueError):
        figures.render(README.replace(*damage), PUBLISHED)


def damage(path: Path, old: str, new: str) -> None:
    text, count = re.subn(old, new, path.read_text(encoding="utf-8"))
    assert count
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bench/ceiling.json", r"(?s).*", "{}"),
        ("bench/ceiling.json", r"(?s).*", "x"),
        ("bench/ceiling.json", '"device"', '"d"'),
        ("bench/all_2_batch_1.out", '"cuda"', '"cpu"'),
        ("bench/all_2_batch_1.out", '"logging_frequency"', '"l"'),
        ("what_fits/load_all.out", r"End: .*\n", ""),
        ("what_fits/load_all.out", '"predicted_gib"', '"p"'),
        ("what_fits/load_all.out", '"cuda"', '"cpu"'),
        ("what_fits/simulated_2.out", '"world_size": 2, "simulated": true', '"simulated": true'),
        ("what_fits/train_all_full.out", r"Run: .*\n", ""),
        ("parity/all_2_bf16_reference_2x4.out", '"cuda"', '"cpu"'),
        ("scaling/all_8_batch_1_gpus_1_fsdp.out", '"config"', '"c"'),
        ("../cpu/parity/fp32_fsdp_2_ranks.out", "(?s).*", "nonsense"),
        ("../cpu/faults_bf16/fault_none.out", "(?s).*", "nonsense"),
    ],
)
def test_damaged_evidence_is_named(tmp_path: Path, name: str, old: str, new: str) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "logs")
    damage(tmp_path / "logs" / "h200" / name, old, new)
    with pytest.raises(ValueError, match=rf"{Path(name).name} cannot be used: "):
        figures.render(README, tmp_path / "logs")


def test_what_a_log_lacks_is_left_out(tmp_path: Path) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "logs")
    scaling = tmp_path / "logs" / "h200" / "scaling"
    damage(scaling / "all_8_batch_1_gpus_1_fsdp.out", r'"peak_reserved_gib": [\d.]+', '"x": 1')
    damage(scaling / "all_9_batch_1_gpus_1_fsdp.out", r'"device_memory_gib": [\d.]+', '"x": 1')
    text, _ = figures.render(README, tmp_path / "logs")
    [before, after] = (re.search(r"in the (\d+) for which", each) for each in (README, text))
    assert before and after and int(after[1]) == int(before[1]) - 2
    for log in (tmp_path / "logs" / "cpu" / "faults").glob("reference_*"):
        log.unlink()
    with pytest.raises(ValueError, match="faults holds no references"):
        figures.render(README, tmp_path / "logs")


def test_damage_ends_in_one_line_and_a_pipe_is_no_log(tmp_path: Path) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "logs")
    for folder in ("what_fits", "bench"):
        os.mkfifo(tmp_path / "logs" / "h200" / folder / "x.out")
    assert figures.render(README, tmp_path / "logs") == figures.render(README, PUBLISHED)
    damage(tmp_path / "logs" / "h200" / "bench" / "ceiling.json", r"(?s).*", "{}")
    command = [sys.executable, "figures.py", "--check", "--published", str(tmp_path / "logs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "ceiling.json cannot be used: " in done.stderr


def test_parity_on_gpus_is_told_from_one_folder(tmp_path: Path) -> None:
    """CPU logs stand in for those of GPUs: one table for all numbers of ranks."""
    for device in ("cpu", "h200"):
        shutil.copytree(PUBLISHED / "cpu" / "parity", tmp_path / device / "parity")
    shutil.copytree(PUBLISHED / "cpu" / "faults", tmp_path / "cpu" / "faults")
    text = figures.parity(tmp_path)
    assert re.search(r"In bf16 \d+ to \d+ % of the weights moved, ", text)
    assert "Not equal is" not in text
    assert text.count("`all` 1 fp32, 2 × 4, resumed: 2 → 1 → 2 ranks |") == 2


def test_no_measurement_is_written_by_hand() -> None:
    assert measurements("12.5 GiB, 7,774.49 tokens/s, 99 %") == ["12.5 GiB", "7,774.49 tokens/s",
                                                                "99 %"]  # fmt: skip
    assert not measurements(prose(README))


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    missing = [
        target
        for target in targets
        if "://" not in target and not (ROOT / target.split("#")[0]).exists()
    ]
    assert not missing


def test_the_tree_names_what_is_there() -> None:
    assert TREE is not None
    named = {line.split()[0] for line in TREE[1].splitlines() if line}
    assert {path.name for path in ROOT.glob("*.py")} <= named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_flags_of_the_commands_exist() -> None:
    num_flags = 0
    for command in commands(README):
        for script, (module, name) in CONFIG_CLASSES.items():
            if not re.search(rf"\b{script}\b", command):
                continue
            config = getattr(import_module(module), name)
            assert is_dataclass(config)
            known = {"--" + item.name.replace("_", "-") for item in fields(config)}
            arguments = command.split(script, 1)[1]
            flags = set(re.findall(r"(?<=\s)--[a-z-]+", arguments))
            assert flags <= known, command
            num_flags += len(flags)
    assert num_flags, "no command was found"
