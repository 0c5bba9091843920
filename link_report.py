"""What do the logs of the link benchmark say: tables for README.md, and the projected figure.

Read from a folder that benchmarks/bench_links.py wrote; links.py has the model.
"""

import statistics
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib import pyplot as plt

import links
from model_config import TransformerConfig
from run_log import RunLog, read_run
from tables import told_tables

FIGURE = "plots/published/links.png"  # as seen from README.md
PROJECTED = (("all", 10), ("n_layers", 1))
GPUS, GPUS_IN_TABLE, GPUS_PER_NODE = (4, 8, 16, 32, 64, 128, 256, 512), (4, 16, 64, 512), 8
LINKS_GB_PER_S = (50.0, 25.0, 12.5)  # between nodes, for each GPU
WAYS = tuple(product(LINKS_GB_PER_S, (False, True)))  # with replicas or without
GATHER, SCATTER = ("all_gather", "bfloat16"), ("reduce_scatter", "float32")
COLLECTIVES = (GATHER, SCATTER, ("reduce_scatter", "bfloat16"))
MESSAGES = ("all 2 block", "all 10 block", "n_layers 1 block", "n_layers 1 embedding, head")
Shape = tuple[str, int]


class Links:
    """Completed logs of a folder, by transport; "": of steps in which nothing travelled."""

    def __init__(self, folder: Path) -> None:
        self.bandwidth: dict[str, RunLog] = {}
        self.steps: dict[tuple[Shape, str], RunLog] = {}
        for run in (read_run(path) for path in sorted(folder.glob("*.out"))):
            if run.status != "completed" or run.run is None:
                continue
            transport, flags = links.transport_of(run.run), run.run.get("config")
            if flags is None:
                self.bandwidth[transport] = run
            else:
                self.steps[(flags["scaling_strategy"], flags["scaling_factor"]), transport] = run

    def records(self, transport: str, kind: tuple[str, str]) -> list[dict[str, Any]]:
        """``Link:`` records of a (collective, dtype)."""
        return [r for r in self.bandwidth[transport].links if (r["collective"], r["dtype"]) == kind]

    def lines(self, transport: str) -> tuple[links.Line, links.Line]:
        """All-gather and reduce-scatter as FSDP uses them."""
        gather, scatter = (links.fit_line(self.records(transport, k)) for k in (GATHER, SCATTER))
        return gather, scatter

    def compute(self, shape: Shape) -> tuple[list[links.Group], float]:
        """Groups of a model, and the seconds that their forward and backward take alone."""
        run = self.steps[shape, ""].run or {}
        config = TransformerConfig(**run["model"])
        groups = links.groups_of(config, run["config"]["sequence_length"])
        alone_s = statistics.median(windows_s(self.steps[shape, ""]))
        return groups, alone_s - links.update_s(groups, run["world_size"])

    def projected(self, shape: Shape, gpus: int, gb_per_s: float, replicate: bool) -> float:
        """Tokens/s per GPU on many GPUs."""
        step_s = links.projected_step_s(
            *self.compute(shape), self.lines("NVLink"), gpus=gpus, gpus_per_node=GPUS_PER_NODE,
            link_bytes_per_s=1e9 * gb_per_s, replicate=replicate,
        )  # fmt: skip
        return tokens_per_gpu(self.steps[shape, ""]) / step_s

    @property
    def projectable(self) -> list[Shape]:
        """Models of which enough was measured."""
        return [s for s in PROJECTED if (s, "") in self.steps and "NVLink" in self.bandwidth]


def tokens_per_gpu(run: RunLog) -> float:
    """Tokens of one GPU in a step."""
    return (run.run or {})["tokens_per_step"] / (run.run or {})["world_size"]


def windows_s(run: RunLog) -> list[float]:
    """Seconds of a step in each logged window but the first, which is the warm-up."""
    first = (run.run or {})["config"]["logging_frequency"]
    return [step.step_s for step in run.steps if step.step > first and step.step_s]


def bandwidth_row(found: Links, transport: str, kind: tuple[str, str]) -> list[str]:
    """The fitted line of one collective, its median error, and some of the measured messages."""
    records = found.records(transport, kind)
    line = links.fit_line(records)
    errors = [abs(line.seconds(r["bytes"]) / r["median_s"] - 1) for r in records]
    bandwidths = {record["group"]: f"{record['bus_gb_per_s']:.1f}" for record in records}
    return [
        transport, kind[0].replace("_", "-"), kind[1], f"{1e6 * line.latency_s:.1f}",
        f"{line.bus_bytes_per_s / 1e9:.1f}", f"{100 * statistics.median(errors):.1f}",
        *(bandwidths.get(group, "n/a") for group in MESSAGES),
    ]  # fmt: skip


def step_row(found: Links, shape: Shape, transport: str) -> list[str]:
    """A measured step, and what the model predicts of it where it has its inputs."""
    run, cells = found.steps[shape, transport], ["n/a"] * 4
    times_s = windows_s(run)
    measured_s = statistics.median(times_s)
    if (shape, "") in found.steps and transport in found.bandwidth:
        (groups, compute_s), (gather, scatter) = found.compute(shape), found.lines(transport)
        update_s = links.update_s(groups, (run.run or {})["world_size"])
        predicted_s = links.step_s(groups, compute_s, gather=gather, scatter=scatter) + update_s
        alone_s, error = compute_s + update_s, predicted_s / measured_s - 1
        cells = [f"{1e3 * alone_s:.1f}", f"{100 * (1 - alone_s / measured_s):.1f}",
                 f"{1e3 * predicted_s:.1f}", f"{100 * error:+.1f}"]  # fmt: skip
    return [
        f"`{shape[0]}` {shape[1]}", transport, f"{tokens_per_gpu(run) / measured_s:,.0f}",
        f"{1e3 * measured_s:.1f}", f"{100 * (max(times_s) - min(times_s)) / measured_s:.1f}",
        *cells, run.path.name,
    ]  # fmt: skip


def replicate_from(found: Links, shape: Shape, gb_per_s: float) -> int | None:
    """Fewest GPUs from which replicas are faster, there and on more; None: never."""

    def pays(gpus: int) -> bool:
        whole, replicas = (found.projected(shape, gpus, gb_per_s, how) for how in (False, True))
        return replicas > whole

    several_nodes = [gpus for gpus in GPUS if gpus > GPUS_PER_NODE]
    return min(takewhile(pays, reversed(several_nodes)), default=None)


def starts(found: Links) -> str:
    """From which number of GPUs to replicate, by model and link, in words."""
    told = []
    for shape in found.projectable:
        fewest = [(link, replicate_from(found, shape, link)) for link in LINKS_GB_PER_S]
        words = (f"{f'{n} GPUs' if n else 'none'} at {link:g} GB/s" for link, n in fewest)
        told.append(f"`{shape[0]}` {shape[1]}, {', '.join(words)}")
    return "; ".join(told)


def link_section(folder: Path) -> str:
    """Markdown of all that a folder's logs say; empty without any."""
    found = Links(folder)
    ran = [of for of in product(links.TRANSPORTS, COLLECTIVES) if of[0] in found.bandwidth]
    stepped = [of for of in product(links.SHAPES, links.TRANSPORTS) if of in found.steps]
    projected = [
        [f"`{shape[0]}` {shape[1]}", str(gpus),
         *(f"{found.projected(shape, gpus, *way):,.0f}" for way in WAYS)]
        for shape, gpus in product(found.projectable, GPUS_IN_TABLE)
    ]  # fmt: skip
    ways = " | ".join(f"{link:g} GB/s, {'replicas' if r else 'FSDP'}" for link, r in WAYS)
    messages = " | ".join(f"{name} (GB/s)" for name in MESSAGES)
    what = found.bandwidth[ran[0][0]].run or {} if ran else {}
    tables = {
        "links: collectives": [bandwidth_row(found, *of) for of in ran],
        "links: steps": [step_row(found, *of) for of in stepped],
        "links: projected": projected,
    }
    return told_tables(tables, most=GPUS[-1], gpus_per_node=GPUS_PER_NODE, starts=starts(found),
                       figure=FIGURE, ways=ways, messages=messages, **what)  # fmt: skip


def plot_projection(folder: Path, path: Path) -> None:
    """Tokens/s per GPU against GPUs; a colour is a link, dashed are replicas. Or nothing."""
    found = Links(folder)
    if not (shapes := found.projectable):
        return
    sns.set_theme(style="whitegrid", palette="colorblind")
    figure = plt.figure(figsize=(5 * len(shapes), 4.5), layout="constrained")
    panels = figure.subplots(1, len(shapes), squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        for link, replicate in WAYS:
            speeds = [found.projected(shape, gpus, link, replicate) for gpus in GPUS]
            label = f"{link:g} GB/s, {'a replica in each node' if replicate else 'FSDP over all'}"
            axes.plot(GPUS, speeds, "--s" if replicate else "-o", markersize=4, label=label,
                      color=f"C{LINKS_GB_PER_S.index(link)}")  # fmt: skip
        axes.set(xscale="log", xlabel="GPUs", title=f"{shape[0]} {shape[1]}", ylim=(0, None))
        axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axes.minorticks_off()
    panels[0][0].set_ylabel("Tokens per second per GPU")
    panels[0][0].legend(title="Between nodes, for each GPU", fontsize=8)
    figure.suptitle(f"Projected from two GPUs: speed on many, {GPUS_PER_NODE} in a node")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
