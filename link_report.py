"""What do the logs of the link benchmark say: tables for README.md, and the projected figure.

Read from a folder that benchmarks/bench_links.py wrote; links.py has the model.
"""

import math
import statistics
from functools import cached_property
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib import pyplot as plt

import links
from analysis import find_logs
from hardware import GPUS_PER_NODE
from model_config import TransformerConfig
from run_log import RunLog, blaming, read_run
from tables import told, told_row, told_tables

FIGURE = "plots/published/links.png"  # as seen from README.md
PROJECTED = (("all", 6), ("n_layers", 1))
GPUS, GPUS_IN_TABLE = (4, 8, 16, 32, 64, 128, 256, 512), (4, 16, 64, 256, 512)
FITTED = ("n_layers", 1), "NVLink"  # the step from which the slowdown is taken
LINKS_GB_PER_S = (50.0, 25.0, 12.5)  # between nodes, for each GPU
WAYS = tuple(product(LINKS_GB_PER_S, (False, True)))  # with replicas or without
COLLECTIVES = (("all_gather", "bfloat16"), ("all_to_all", "bfloat16"),
               ("reduce_scatter", "float32"))  # fmt: skip
MESSAGES = ("all 2 block", "all 10 block", "n_layers 1 block", "n_layers 1 embedding, head")
# What a step shares with the one in which nothing travels, against which it is held.
PAIRED = ("batch_size", "sequence_length", "model_dtype", "compute_dtype")
NOISE = 0.02  # share of a step by which two runs may differ: in the clocks of their GPUs
Shape = tuple[str, int]


class Links:
    """The logs of a folder, by transport; "": of steps in which nothing travelled.

    Raises ValueError, with the log's name, for one that is no evidence: none is left out.
    """

    def __init__(self, folder: Path) -> None:
        found: dict[tuple[Shape | None, str], RunLog] = {}
        for path in find_logs(folder):
            with blaming(path):
                run = read_run(path)
                if (of := measured(run)) in found:
                    raise ValueError(f"{found[of].path.name} is of the same")
                if found and conditions(run) != conditions(first := next(iter(found.values()))):
                    raise ValueError(f"of {conditions(run)}, but {first.path.name} of "
                                     f"{conditions(first)}")  # fmt: skip
                found[of] = run
        self.bandwidth = {way: run for (shape, way), run in found.items() if shape is None}
        self.steps = {(shape, way): run for (shape, way), run in found.items() if shape}

    def records(self, transport: str, kind: tuple[str, str]) -> list[dict[str, Any]]:
        """``Link:`` records of a (collective, dtype)."""
        return [r for r in self.bandwidth[transport].links if (r["collective"], r["dtype"]) == kind]

    def line(self, transport: str, kind: tuple[str, str]) -> links.Line:
        """The line through the messages of a (collective, dtype)."""
        with blaming(self.bandwidth[transport].path):
            return links.fit_line(self.records(transport, kind))

    def lines(self, transport: str) -> tuple[links.Line, links.Line, links.Line]:
        """All-gather, exchange and reduce-scatter as FSDP uses them."""
        gather, exchange, scatter = (self.line(transport, kind) for kind in COLLECTIVES)
        return gather, exchange, scatter

    def compute(self, shape: Shape) -> tuple[list[links.Group], float]:
        """Groups of a model, and the seconds that their forward and backward take alone."""
        run, log = self.steps[shape, ""].run or {}, self.steps[shape, ""]
        with blaming(log.path):
            config = TransformerConfig(**run["model"])
            groups = links.groups_of(config, run["config"]["sequence_length"])
            update_s = links.update_s(groups, run["world_size"])
            if (compute_s := median_step_s(log) - update_s) <= 0:
                raise ValueError(f"the optimizer's {update_s:g} s leave no time to compute")
        return groups, compute_s

    def is_predictable(self, shape: Shape, transport: str) -> bool:
        """Whether enough was measured to predict its step."""
        return (shape, "") in self.steps and transport in self.bandwidth

    def predicted_s(
        self, shape: Shape, transport: str, slowdown: float, *, gpus: int = 2,
        gb_per_s: float = math.inf, replicate: bool = False,
    ) -> float:  # fmt: skip
        """Seconds of a step; ``gb_per_s`` between nodes, for each GPU."""
        return links.projected_step_s(
            *self.compute(shape), self.lines(transport), gpus=gpus, gpus_per_node=GPUS_PER_NODE,
            link_bytes_per_s=1e9 * gb_per_s, replicate=replicate, slowdown=slowdown,
        )  # fmt: skip

    @property
    def is_fitted(self) -> bool:
        """Whether the one step from which the slowdown is taken was measured."""
        return FITTED in self.steps and self.is_predictable(*FITTED)

    @cached_property
    def slowdown(self) -> float:
        """What a second of communication beside computation costs it, by the one step FITTED.

        Raises ValueError where it would cost more than alone, which is no slowdown.
        """
        if not self.is_fitted:
            return 0.0
        run = self.steps[FITTED]
        none, whole = (self.predicted_s(*FITTED, slowdown) for slowdown in (0.0, 1.0))
        with blaming(run.path):
            if (measured_s := median_step_s(run)) > whole:
                raise ValueError(
                    f"a step of {measured_s:g} s, but {whole:g} s if nothing is hidden"
                )
        return max(0.0, (measured_s - none) / (whole - none)) if whole > none else 0.0

    def error(self, shape: Shape, transport: str) -> float:
        """By which share the prediction of a measured step is off; above 0: too slow."""
        measured_s = median_step_s(self.steps[shape, transport])
        return self.predicted_s(shape, transport, self.slowdown) / measured_s - 1

    @cached_property
    def margin(self) -> float:
        """The largest error of the predictions over NVLink, of which projections are made."""
        steps = (of for of in self.steps if of[1] == "NVLink" and self.is_predictable(*of))
        return max((abs(self.error(*of)) for of in steps), default=0.0)

    def projected(self, shape: Shape, gpus: int, gb_per_s: float, replicate: bool) -> float:
        """Tokens/s per GPU on many GPUs."""
        step_s = self.predicted_s(
            shape, "NVLink", self.slowdown, gpus=gpus, gb_per_s=gb_per_s, replicate=replicate
        )
        return tokens_per_gpu(self.steps[shape, ""]) / step_s

    @property
    def projectable(self) -> list[Shape]:
        """Models of which enough was measured."""
        return [shape for shape in PROJECTED if self.is_predictable(shape, "NVLink")]


def measured(run: RunLog) -> tuple[Shape | None, str]:
    """(shape whose step was timed, None of collectives; transport), or raises ValueError."""
    record = run.run or {}
    if run.status != "completed":
        raise ValueError(f"its status is {run.status}")
    links.check_measured(record)
    if (flags := record.get("config")) is None:
        return None, links.transport_of(record)
    shape = flags["scaling_strategy"], flags["scaling_factor"]
    if not record.get("gradients_exchanged"):
        raise ValueError("its gradients were reduced in fp32, which is not what is predicted")
    if shape not in links.SHAPES:
        raise ValueError(f"{shape[0]} {shape[1]} is no shape of this series")
    return shape, links.transport_of(record)


def conditions(run: RunLog) -> dict[str, Any]:
    """What all logs of a series share: GPU, versions, and NCCL's settings but its transport."""
    record = run.run or {}
    versions = {name: record["versions"][name] for name in ("torch", "nccl")}
    switches = set().union(*links.TRANSPORTS.values())
    settings = {k: v for k, v in record["nccl_environment"].items() if k not in switches}
    return {"device": record["device"], **versions, **settings}


def check_pair(real: RunLog, alone: RunLog) -> None:
    """Raise ValueError where these are not the same step, with and without communication."""
    flags, others = ((run.run or {})["config"] for run in (real, alone))
    for name in PAIRED:
        if flags[name] != others[name]:
            raise ValueError(f"{name} is {flags[name]}, but {others[name]} in {alone.path.name}")
    if median_step_s(alone) > (1 + NOISE) * median_step_s(real):
        raise ValueError(f"{alone.path.name}, in which nothing travels, is slower than it")


def tokens_per_gpu(run: RunLog) -> float:
    """Tokens of one GPU in a step."""
    return (run.run or {})["tokens_per_step"] / (run.run or {})["world_size"]


def windows_s(run: RunLog) -> list[float]:
    """Seconds of a step in each logged window but the first, which is the warm-up."""
    first = (run.run or {})["config"]["logging_frequency"]
    return [step.step_s for step in run.steps if step.step > first and step.step_s is not None]


def median_step_s(run: RunLog) -> float:
    """Median of `windows_s`. Raises ValueError, with the log's name, where one is no time."""
    with blaming(run.path):
        times_s = windows_s(run)
        if not all(0 < seconds < math.inf for seconds in times_s):
            raise ValueError(f"steps take {times_s} s")
        return statistics.median(times_s)


def bandwidth_row(found: Links, transport: str, kind: tuple[str, str]) -> str:
    """The fitted line of one collective, its median error, and some of the measured messages."""
    line, records = found.line(transport, kind), found.records(transport, kind)
    errors = [abs(line.seconds(r["bytes"]) / r["median_s"] - 1) for r in records]
    bandwidths = {record["group"]: f"{record['bus_gb_per_s']:.1f}" for record in records}
    return told_row(
        "links: collectives", transport=transport, collective=kind[0].replace("_", "-"),
        dtype=kind[1], latency_us=1e6 * line.latency_s, gb_per_s=line.bus_bytes_per_s / 1e9,
        error=100 * statistics.median(errors),
        bandwidths=" | ".join(bandwidths.get(group, "n/a") for group in MESSAGES),
    )  # fmt: skip


def step_row(found: Links, shape: Shape, transport: str) -> str:
    """A measured step, and what the model predicts of it where it has its inputs."""
    run, alone_s, error = found.steps[shape, transport], math.nan, math.nan
    measured_s, times_s = median_step_s(run), windows_s(run)
    if alone := found.steps.get((shape, "")):
        with blaming(run.path):
            check_pair(run, alone)
    if alone and transport in found.bandwidth:
        alone_s, error = median_step_s(alone), found.error(shape, transport)
    return told_row(
        "links: steps", shape=shape, transport=transport, log=run.path.name,
        speed=tokens_per_gpu(run) / measured_s, step_ms=1e3 * measured_s,
        spread=100 * (max(times_s) - min(times_s)) / measured_s, alone_ms=1e3 * alone_s,
        exposed=100 * (1 - alone_s / measured_s), error=100 * error,
        predicted_ms=1e3 * (1 + error) * measured_s,
    )  # fmt: skip


def replicate_from(found: Links, shape: Shape, gb_per_s: float) -> int | None:
    """Fewest GPUs from which replicas are faster, there and on more, by more than `Links.margin`.

    None: on none of `GPUS`.
    """

    def pays(gpus: int) -> bool:
        whole, replicas = (found.projected(shape, gpus, gb_per_s, how) for how in (False, True))
        return replicas > (1 + found.margin) * whole

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
    projected = []
    for shape, gpus in product(found.projectable, GPUS_IN_TABLE):
        speeds = " | ".join(f"{found.projected(shape, gpus, *way):,.0f}" for way in WAYS)
        projected.append(told_row("links: projected", shape=shape, gpus=gpus, speeds=speeds))
    ways = " | ".join(f"{link:g} GB/s, {'replicas' if r else 'FSDP'}" for link, r in WAYS)
    messages = " | ".join(f"{name} (GB/s)" for name in MESSAGES)
    what = found.bandwidth[ran[0][0]].run or {} if ran else {}
    own = conditions(found.bandwidth[ran[0][0]]).items() if ran else ()
    settings = ", ".join(f"{name}={value}" for name, value in own if name.startswith("NCCL_"))
    fitted = f"`{FITTED[0][0]}` {FITTED[0][1]} over {FITTED[1]}"
    slowdown = told("links: fitted" if found.is_fitted else "links: not fitted",
                    slowdown=found.slowdown, step=fitted)  # fmt: skip
    tables = {
        "links: collectives": [bandwidth_row(found, *of) for of in ran],
        "links: steps": [step_row(found, *of) for of in stepped],
        "links: projected": projected,
    }
    return told_tables(
        tables, most=GPUS[-1], gpus_per_node=GPUS_PER_NODE, starts=starts(found), figure=FIGURE,
        ways=ways, messages=messages, slowdown=slowdown, margin=100 * found.margin,
        environment=settings or "NCCL's defaults", hop=1e6 * links.HOP_S,
        node_hop=1e6 * links.NODE_HOP_S, **what,
    )  # fmt: skip


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
    figure.suptitle(
        f"Projected from two GPUs, a row each: speed on many, {GPUS_PER_NODE} in a node"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
