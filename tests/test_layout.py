"""Does the code keep to its layout: who may import whom, how long is it, where does it point?"""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Documentation is not held against anybody: docstrings, comments and blank lines are not counted.
MAX_LINES_OF_CODE = 6782
MAX_LINES_FUNCTION = 60
MAX_LINES_DIFFERENT = 12

# What each room may import: rooms, then packages, beside the standard library. A room may only
# import rooms that stand above it.
LOG_ROOMS = "run_log model_config hardware"
MODEL_ROOMS = "attention loss weights model"
CORE_ROOMS = (
    f"{LOG_ROOMS} cli processes memory utils {MODEL_ROOMS} optimizer dataset distributed checkpoint"
)
TRAINING_ROOMS = f"{CORE_ROOMS} train_config job step resume"
ROOMS: dict[str, tuple[str, str]] = {
    "run_log": ("", ""),
    "model_config": ("", ""),
    "hardware": ("", ""),
    "breakdown": ("", ""),
    "links": ("model_config", ""),
    "tables": ("", ""),
    "cli": ("", "tyro"),
    "processes": ("", ""),
    "memory": ("model_config hardware cli", "tyro"),
    "utils": ("", "torch numpy"),
    "attention_triton": ("", "torch triton"),
    "attention": ("attention_triton", "torch"),
    "loss": ("model_config", "torch"),
    "weights": ("", "torch"),
    "model": ("model_config attention loss", "torch"),
    "optimizer": ("", "torch"),
    "dataset": ("", "torch numpy pyarrow tokenizers tiktoken mistral_common transformers"),
    "distributed": ("hardware model utils", "torch"),
    "preflight": ("", "torch"),
    "checkpoint": ("processes utils", "torch"),
    "train_config": (CORE_ROOMS, "torch"),
    "job": (f"{CORE_ROOMS} train_config breakdown", "torch"),
    "step": (f"{CORE_ROOMS} train_config", "torch"),
    "resume": (f"{CORE_ROOMS} train_config job", "torch"),
    "trainer": (TRAINING_ROOMS, "torch tqdm"),
    "train": (f"{TRAINING_ROOMS} trainer", "torch tqdm"),
    "train_fsdp": (f"{TRAINING_ROOMS} trainer", "torch tqdm"),
    "probe": (f"{TRAINING_ROOMS} trainer", "torch"),
    "search": (f"{TRAINING_ROOMS} trainer probe", "torch"),
    "load_model_no_fsdp": ("cli distributed search", "torch"),
    "analysis": (f"{LOG_ROOMS} breakdown", "numpy pandas"),
    "parity": (f"{LOG_ROOMS} analysis", "numpy pandas"),
    "loss_figure": (f"{LOG_ROOMS} analysis parity", "numpy matplotlib"),
    "loss_ablation": (f"{LOG_ROOMS} cli analysis parity loss_figure", "numpy pandas tyro"),
    "fit_report": (f"{LOG_ROOMS} memory analysis tables", "seaborn matplotlib"),
    "link_report": (f"{LOG_ROOMS} links tables analysis", "seaborn matplotlib"),
    "study": (f"{LOG_ROOMS} analysis", "numpy pandas"),
    "comparison": (f"{LOG_ROOMS} breakdown tables analysis study", "numpy pandas"),
    "plots": (
        f"{LOG_ROOMS} breakdown tables cli analysis study",
        "numpy pandas seaborn matplotlib tyro",
    ),
    "figures": (
        f"{LOG_ROOMS} tables cli memory analysis parity loss_figure comparison fit_report "
        "link_report",
        "numpy pandas matplotlib",
    ),
}
NO_TORCH = [room for room, (_, packages) in ROOMS.items() if "torch" not in packages.split()]
EXISTING = [path.stem for path in sorted(ROOT.glob("*.py"))]
PRODUCT_FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")])


def imported_modules(source: str) -> set[str]:
    """First parts of all names imported anywhere in a source text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


def is_script(room: str) -> bool:
    """Whether a room is meant to be run."""
    return 'if __name__ == "__main__":' in (ROOT / f"{room}.py").read_text()


def long_functions(source: str, limit: int) -> list[tuple[str, int]]:
    """(name, lines) of each function of a source text that is longer than the limit."""
    functions = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = ((node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions)
    return [(name, length) for name, length in lengths if length > limit]


def count_code_lines(source: str) -> int:
    """Lines of a source text that hold more than documentation."""
    documentation = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(
        bool(text.strip()) and not text.lstrip().startswith("#")
        for number, text in lines
        if number not in documentation
    )


def absolute_paths(text: str) -> list[str]:
    """Paths that name folders of one machine."""
    found = re.findall(r"""(?<![\w.$}~:/<*-])/[A-Za-z][\w.-]*/[\w./-]*""", text)
    return [
        path for path in found if path.split("/")[1] not in {"bin", "dev", "proc", "sys", "usr"}
    ]


@pytest.mark.parametrize("room", EXISTING)
def test_imports_only_what_its_row_allows(room: str) -> None:
    assert room in ROOMS, f"{room}.py is not in the table of rooms"
    rooms, packages = (set(part.split()) for part in ROOMS[room])
    imported = imported_modules((ROOT / f"{room}.py").read_text()) - set(sys.stdlib_module_names)
    assert imported <= rooms | packages


def test_imports_point_upward() -> None:
    order = list(ROOMS)
    for index, (room, (rooms, _)) in enumerate(ROOMS.items()):
        above = set(order[:index])
        assert set(rooms.split()) <= above, f"{room} may import only what stands above it"


def test_scripts_import_no_scripts() -> None:
    scripts = {room for room in EXISTING if is_script(room)}
    assert {"train", "train_fsdp"} <= scripts
    for room in EXISTING:
        imported = imported_modules((ROOT / f"{room}.py").read_text())
        assert not imported & (scripts - {"memory"}), f"{room} imports a script"


def test_analysis_does_not_load_torch() -> None:
    rooms = [room for room in NO_TORCH if room in EXISTING]
    assert {"run_log", "model_config", "hardware"} <= set(rooms)
    code = f"import sys, {', '.join(rooms)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr or "torch was loaded"


def test_analysis_leaves_the_backend_of_matplotlib_alone() -> None:
    rooms = [room for room in EXISTING if "matplotlib" in ROOMS[room][1].split()]
    code = "import matplotlib; matplotlib.use('svg')\n"
    code += f"import {', '.join(rooms)}; assert matplotlib.get_backend() == 'svg'"
    assert rooms
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_scripts_differ_only_where_fsdp_does() -> None:
    single, sharded = (
        (ROOT / name).read_text().splitlines() for name in ("train.py", "train_fsdp.py")
    )
    changes = [line for line in difflib.ndiff(single, sharded) if line.startswith("+ ")]
    assert 1 <= len(changes) <= MAX_LINES_DIFFERENT, "\n".join(changes)


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=lambda path: path.name)
def test_functions_fit_a_screen(path: Path) -> None:
    assert not long_functions(path.read_text(), MAX_LINES_FUNCTION)


def test_long_functions_are_found() -> None:
    source = "class A:\n    async def f(self):\n        a = 1\n        return a\ndef g(): ...\n"
    assert long_functions(source, 2) == [("f", 3)]


def test_somebody_can_read_it_in_an_evening() -> None:
    texts = {path.name: path.read_text() for path in PRODUCT_FILES}
    code = {name: count_code_lines(text) for name, text in texts.items()}
    num_lines = sum(len(text.splitlines()) for text in texts.values())
    print(f"outside tests: {sum(code.values())} lines of code, {num_lines} with documentation")
    assert sum(code.values()) <= MAX_LINES_OF_CODE, code


def test_code_lines_are_counted() -> None:
    source = '"""Doc.\n\nMore.\n"""\n\n# why\nx = [  # what\n    """not a doc""",\n]\n'
    assert count_code_lines(source) == 3


def test_nothing_points_at_one_machine() -> None:
    patterns = ("*.py", "*.sh", "README.md", "LOG.md", "Makefile", ".ci/run", "sbatch_files/*")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert len(files) > len(EXISTING)
    found = {path.name: absolute_paths(path.read_text()) for path in files}
    assert not {name: paths for name, paths in found.items() if paths}


def test_absolute_paths_are_found() -> None:
    text = "cd /home/someone/x; cat=/scratch/a/b 'logs/demo/a' >/dev/null a/b/c https://x.y/z/w"
    assert absolute_paths(text) == ["/home/someone/x", "/scratch/a/b"]
