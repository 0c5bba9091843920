"""Is a run with FSDP the same training as runs without it, up to the order of sums?

Runs without FSDP that differ only in the order of reduction (8 rows as 8×1, 4×2 or 2×4
micro-batches) differ by rounding alone. That noise, measured, is the floor: FSDP is *equal* when at
every common step its difference from the references' mean is at most ``FACTOR`` × the floor, for
the loss, the grad norm and the final weights. Reads no file and prints nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from run_log import LegacyFacts, RunLog

FACTOR = 4.0
MIN_REFERENCES = 3
MIN_MOVED_SHARE = 0.9
# A floor beyond which a fault could hide: of the loss, and of the grad norm, relative.
SHARP_LOSS, SHARP_NORM = 0.01, 0.25
LOSS_DECIMALS = 6  # of a log with a Run record; an older one shows how many it has
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
ALL_WEIGHTS = "all parameters"

Verdict = Literal["equal", "not equal", "not comparable", "cannot tell"]
EXIT_STATUS = {"equal": 0, "not equal": 1, "not comparable": 2, "cannot tell": 4}

# Places in the Run record. What two runs must share to be compared (initial weights depend on the
# device type), and what else is worth seeing side by side.
PARITY_FIELDS = (
    "config.set_seed data.fingerprint global_batch config.sequence_length config.packing "
    "tokenizer.name config.scaling_strategy config.scaling_factor model config.model_dtype "
    "compute_dtype config.learning_rate config.lr_warmup_steps config.grad_max_norm device_type"
)
OTHER_FIELDS = (
    "script commit dirty versions.torch device world_size replicas config.batch_size "
    "config.grad_accumulation_steps config.activation_checkpointing config.compile "
    "config.cpu_offload"
)


@dataclass(frozen=True)
class Gap:
    """One quantity of the FSDP run farthest from the references' mean, at one step (or parameter).

    Losses differ absolutely, grad norms and weights relatively (1 = 100 %).
    """

    where: str
    fsdp: float
    reference: float
    difference: float
    floor: float

    @property
    def step(self) -> int:
        """The step of a loss or grad norm."""
        return int(self.where.removeprefix("step "))

    @property
    def ratio(self) -> float:
        """Difference ÷ floor; infinite when one of the runs has no number there."""
        ratio = self.difference / self.floor
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True)
class Comparison:
    """What was found, quantity by quantity, and the verdict with its reason in one sentence."""

    verdict: Verdict
    reason: str
    losses: tuple[Gap, ...]  # per common step
    grad_norms: tuple[Gap, ...]
    weights: tuple[Gap, ...]  # of all parameters together first, then one by one
    moved_share: float | None
    mismatches: tuple[str, ...]
    notes: tuple[str, ...]
    num_references: int
    decimals: int  # of the losses

    @property
    def exit_status(self) -> int:
        """0 equal, 1 not equal, 2 not comparable, 4 cannot tell."""
        return EXIT_STATUS[self.verdict]

    @property
    def num_sharp(self) -> int:
        """Steps, from the first, at which the floor is narrow; after them equality shows little."""
        wide = (
            loss.floor > SHARP_LOSS * abs(loss.reference) or norm.floor > SHARP_NORM
            for loss, norm in zip(self.losses, self.grad_norms, strict=bool(self.grad_norms))
        )
        return next((steps for steps, is_wide in enumerate(wide) if is_wide), len(self.losses))

    @property
    def floor_name(self) -> str:
        """What the floor is made of."""
        return "noise of reordered sums" if self.num_references >= MIN_REFERENCES else "precision"


def largest(gaps: Sequence[Gap]) -> Gap:
    """The gap with the largest difference; of equal ones the first."""
    # 11.33 − 11.32 and 7.48 − 7.47 print the same and differ in their 15th digit.
    return max(gaps, key=lambda gap: round(gap.difference, 12))


def worst(gaps: Sequence[Gap]) -> Gap:
    """The gap that is most floors wide."""
    return max(gaps, key=lambda gap: gap.ratio)


def field_of(run: RunLog, place: str) -> Any:
    """What a log says at a place of the Run record (an older log: as far as it is known)."""
    value: Any = run.run or _legacy_record(run)
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _legacy_record(run: RunLog) -> dict[str, Any]:
    facts = vars(run.legacy or LegacyFacts())
    renamed = {"set_seed": "seed", "scaling_strategy": "strategy", "scaling_factor": "factor"}
    config = facts | {name: facts[older] for name, older in renamed.items()}
    return {"config": config, "world_size": facts["world_size"], "device": facts["device"]}


def mismatches(runs: Sequence[RunLog]) -> tuple[str, ...]:
    """What the runs would have to share and do not: each field with two of its values."""
    found = []
    for place in PARITY_FIELDS.split():
        values = [value for run in runs if (value := field_of(run, place)) is not None]
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            first = values[0]
            if isinstance(first, dict):  # of a model's shape, what differs
                first, other = (dict(sorted(x.items() - y.items())) for x, y in
                                ((first, other), (other, first)))  # fmt: skip
            found.append(f"{label_of(place)} ({first} and {other})")
    return tuple(found)


def label_of(place: str) -> str:
    """How a field is called in print: ``config.set_seed`` is "set seed"."""
    return place.removeprefix("config.").replace("_", " ")


@dataclass(frozen=True)
class Precision:
    """What arithmetic and printed digits can resolve: the least that a floor can be.

    - Summing: pairwise fp32 sums of n numbers err by about ε·√log2(n) relative, ε = 2⁻²³ (Higham
      1993, SIAM J. Sci. Comput. 14, section 5).
    - Loss: a mean over N tokens, summed in fp32. With bf16 activations each token's loss errs by
      about 2⁻⁸ relative, independently of the others, and so the mean by √N less. It is not 2⁻⁸ of
      the loss, behind which real faults would hide.
    - Grad norm: an fp32 sum over all n weights of gradients that are themselves long sums, and
      rounded to the dtype: the bound ε·log2(n), not its usual size.
    - Final weights: √ε. AdamW's first steps are sign(gradient) × rate (Kingma and Ba 2015, section
      2.1). Rounding turns the sign where |gradient| is less than about ε of its usual size: a share
      ε of the weights, whose steps then differ in full. 3.5e-4 in fp32, 0.06 in bf16.

    With enough references the growth over the steps is measured, and this is one step's precision.
    With fewer it is assumed: roundings of t steps add to the loss as a random walk, √t, and after
    the first update the grad norm differs as much as the weights it is taken at, √ε.
    """

    epsilon: float
    num_tokens: float
    num_weights: float
    decimals: int
    measured: bool

    @property
    def coarse(self) -> float:
        """ε of a dtype coarser than fp32, else 0."""
        return self.epsilon if self.epsilon > EPSILON["float32"] else 0.0

    def loss(self, loss: float, step: int) -> float:
        """Absolute."""
        summed = EPSILON["float32"] * math.sqrt(math.log2(self.num_tokens))
        single = abs(loss) * max(summed, self.coarse / math.sqrt(self.num_tokens))
        return max(10.0**-self.decimals, single * (1.0 if self.measured else math.sqrt(step)))

    def grad_norm(self, norm: float, step: int) -> float:
        """Relative."""
        summed = EPSILON["float32"] * math.log2(self.num_weights)
        single = max(10.0**-self.decimals / (norm or 1.0), summed, self.coarse)
        return single if self.measured or step == 1 else max(single, self.weights)

    @property
    def weights(self) -> float:
        """Relative to the norm of (final − initial)."""
        return math.sqrt(self.epsilon)


def precision_of(runs: Sequence[RunLog], *, num_references: int) -> Precision:
    """The precision of the first of some comparable runs, and the fewest decimals of them all."""
    run = runs[0]
    record = run.run or {}
    # The older runs were bf16, and logged one rank's row of 4096.
    stored = "float32" if field_of(run, "config.model_dtype") == "fp32" else "bfloat16"
    tokens_pct = min(step.training_tokens_pct for step in run.steps)
    return Precision(
        epsilon=max(EPSILON[stored], EPSILON.get(record.get("compute_dtype", stored), 0.0)),
        num_tokens=max(record.get("tokens_per_step", 4096) * tokens_pct / 100, 2.0),
        num_weights=max(record.get("num_parameters", 2), 2),
        decimals=min(_decimals(run) for run in runs),
        measured=num_references >= MIN_REFERENCES,
    )


def _decimals(run: RunLog) -> int:
    """Decimals of the losses as printed: those of the format, or the most that an old log shows."""
    if run.run is not None:
        return LOSS_DECIMALS
    shown = (repr(step.loss).partition(".")[2] for step in run.steps if math.isfinite(step.loss))
    return max((len(digits) for digits in shown), default=2)


def _step_gaps(
    name: str, runs: Sequence[RunLog], num_fsdp: int, precision: Precision
) -> tuple[Gap, ...]:
    """Gaps of the loss or the grad norm at the common steps of runs, FSDP first.

    The floor is the running maximum over the steps. No gaps where a log lacks the grad norm.
    """
    by_step = [{step.step: getattr(step, name) for step in run.steps} for run in runs]
    gaps, noise = [], 0.0
    for step in sorted(set.intersection(*map(set, by_step))):
        values = [table[step] for table in by_step]
        if None in values:
            return ()
        ours, theirs = np.array(values[:num_fsdp], float), np.array(values[num_fsdp:], float)
        mean = float(theirs.mean())
        scale = abs(mean) if name != "loss" and mean else 1.0
        # Below 1e-9: the mean of equal numbers can differ from them in the last bit.
        with np.errstate(invalid="ignore"):
            differences = np.abs(ours - mean) / scale
        differences[~np.isfinite(differences)] = math.inf
        differences[differences < 1e-9] = 0.0
        farthest = int(differences.argmax())
        floor = 10.0**-LOSS_DECIMALS
        if math.isfinite(mean):
            noise = max(noise, float(np.ptp(theirs)) / scale if precision.measured else 0.0)
            floor = max(noise, getattr(precision, name)(mean, step))
        gap = Gap(f"step {step}", float(ours[farthest]), mean, float(differences[farthest]), floor)
        gaps.append(gap)
    return tuple(gaps)


def _digest(run: RunLog) -> dict[str, Any]:
    digest: Any = (run.end or {}).get("digest")
    whole = isinstance(digest, dict) and isinstance(digest.get("parameters"), dict)
    return digest if whole and "moved_share" in digest else {}


def _weight_gaps(runs: Sequence[RunLog], num_fsdp: int, precision: Precision) -> tuple[Gap, ...]:
    """Relative differences of (final − initial) weights, all together and per parameter.

    K projections on standard normal vectors have the expected square norm K·‖difference‖²
    (Johnson and Lindenstrauss 1984), so the difference of projections ÷ (√K · the references' norm)
    estimates the relative difference. Few projections make one parameter's estimate rough: its
    floor is never below that of all parameters together. A parameter that no reference moved (a
    norm weight of 1 in bf16) is held against the norm of all. No gaps where a digest is missing or
    the runs ended after different steps.
    """
    parameters = [_digest(run).get("parameters", {}) for run in runs]
    names = list(parameters[0])
    same_steps = len({(run.end or {}).get("steps_done") for run in runs}) == 1
    if not names or not same_steps or any(list(other) != names for other in parameters):
        return ()
    # P parameters, R runs (FSDP first), K projections
    projections_PRK = np.array([[run[name]["projections"] for run in parameters] for name in names])
    norms_PR = np.array([[run[name]["norm"] for run in parameters] for name in names], dtype=float)
    projections_PRK = projections_PRK.astype(float) / math.sqrt(projections_PRK.shape[2])
    ours, theirs = projections_PRK[:, :num_fsdp], projections_PRK[:, num_fsdp:]
    differences = np.square(ours - theirs.mean(1, keepdims=True)).sum(2)
    repeats = theirs if precision.measured else theirs[:, :0]
    noise_PRR = np.square(repeats[:, :, None] - repeats[:, None]).sum(3)  # of each two references
    total = float(np.sqrt(np.square(norms_PR[:, num_fsdp:]).sum(0)).mean()) or 1.0

    def gap(where: str, rows: slice, least_floor: float) -> Gap:
        norms = np.sqrt(np.square(norms_PR[rows]).sum(0))
        difference = np.nan_to_num(np.sqrt(differences[rows].sum(0)), nan=math.inf, posinf=math.inf)
        farthest = int(difference.argmax())
        reference = float(norms[num_fsdp:].mean())
        scale = reference or total
        floor = max(float(np.sqrt(noise_PRR[rows].sum(0)).max(initial=0.0)) / scale, least_floor)
        ours = float(norms[farthest])
        return Gap(where, ours, reference, float(difference[farthest]) / scale, floor)

    together = gap(ALL_WEIGHTS, slice(None), precision.weights)
    places = ((name, slice(row, row + 1)) for row, name in enumerate(names))
    return (together, *(gap(name, place, together.floor) for name, place in places))


def _without_copies(runs: Sequence[RunLog], notes: list[str]) -> list[RunLog]:
    """The runs, each once; a note for each that was given again."""
    kept: list[RunLog] = []
    for run in runs:
        # Two runs never take the same time at each step: equal lines are the same file, or a copy.
        if any(run.steps == other.steps for other in kept):
            notes.append(f"warning: {run.path} was given twice; the second is left out")
        else:
            kept.append(run)
    return kept


def compare(fsdp: Sequence[RunLog], references: Sequence[RunLog]) -> Comparison:
    """Compare runs with FSDP to runs without; of several with FSDP the farthest counts.

    With fewer than three references their noise is not measured: `Precision` alone is the floor.
    Raises ValueError for a log without steps.
    """
    for run in (*fsdp, *references):
        if not run.steps:
            out_of_memory = run.status == "out_of_memory"
            why = "its job ran out of memory" if out_of_memory else "is it a job log?"
            raise ValueError(f"{run.path} holds no steps ({why})")
    notes: list[str] = []
    fsdp, references = _without_copies(fsdp, notes), _without_copies(references, notes)
    runs = [*fsdp, *references]
    precision = precision_of(runs, num_references=len(references))
    kinds = {
        "loss": _step_gaps("loss", runs, len(fsdp), precision),
        "grad norm": _step_gaps("grad_norm", runs, len(fsdp), precision),
        "final weights": _weight_gaps(runs, len(fsdp), precision),
    }
    unequal = mismatches(runs)
    verdict, reason = _judge(runs, kinds, unequal=unequal, decimals=precision.decimals)
    shares = [_digest(run)["moved_share"] for run in runs if kinds["final weights"]]
    moved_share = min(shares, default=None)
    notes += _notes_on(fsdp, references, moved_share=moved_share)
    found = Comparison(
        verdict, reason, *kinds.values(), moved_share=moved_share, mismatches=unequal,
        notes=tuple(notes), num_references=len(references), decimals=precision.decimals,
    )  # fmt: skip
    if found.num_sharp == len(found.losses):
        return found
    where = found.losses[found.num_sharp].where
    note = (
        f"from {where} on the floor is wider than {100 * SHARP_LOSS:g} % "
        f"of the loss or {100 * SHARP_NORM:g} % of the grad norm: equal shows little there"
    )
    return replace(found, notes=(*notes, note))


def _notes_on(
    fsdp: Sequence[RunLog], references: Sequence[RunLog], *, moved_share: float | None
) -> Iterator[str]:
    """What a reader must know before believing the verdict."""
    for run in (*fsdp, *references):
        if run.run is not None and bool(run.run.get("fsdp")) != (run in fsdp):
            side, other = ("FSDP", "without it") if run in fsdp else ("NO FSDP", "with FSDP")
            yield f"warning: {run.path} was given as {side} and is a run {other}"
        if run.run is not None and run.status != "completed":
            yield f"warning: {run.path} did not complete ({run.status})"
    for run in fsdp:
        if any(run.steps == other.steps for other in references):
            yield f"warning: {run.path} is on both sides; it can only equal itself"
    places = ("config.batch_size", "config.grad_accumulation_steps")
    orders = {tuple(field_of(run, place) for place in places) for run in references}
    if len(references) < MIN_REFERENCES:
        yield (f"{len(references)} reference run(s), fewer than {MIN_REFERENCES}: their noise is "
               "not measured, and the precision is the floor")  # fmt: skip
    elif len(orders) < MIN_REFERENCES:
        yield "references share an order of reduction: their noise may be underestimated"
    if moved_share is not None and moved_share < MIN_MOVED_SHARE:
        yield (f"only {100 * moved_share:.0f} % of the weights moved at all: equal weights prove "
               "little (choose a higher learning rate)")  # fmt: skip


def _judge(
    runs: Sequence[RunLog], kinds: dict[str, tuple[Gap, ...]], *, unequal: Sequence[str],
    decimals: int,
) -> tuple[Verdict, str]:  # fmt: skip
    """The verdict and its reason, from what cannot be compared to what is equal."""
    if unequal:
        return "not comparable", f"the runs differ in {'; '.join(unequal)}"
    if not kinds["loss"]:
        return "not comparable", "the logs have no step in common"
    for run in runs:
        bad = next((step for step in run.steps if not math.isfinite(step.loss)), None)
        if bad is not None:
            return "not equal", f"the loss of {run.path} is {bad.loss} at step {bad.step}"
    for kind, gaps in kinds.items():
        if gaps and (gap := worst(gaps)).ratio > FACTOR:
            relation = "absolute" if kind == "loss" else "relative"
            return "not equal", (
                f"the {kind} ({gap.where}) has the {relation} difference {gap.difference:.2g}, "
                f"{gap.ratio:,.3g} × its floor {gap.floor:.2g}; {FACTOR:g} × is the limit"
            )
    if decimals < LOSS_DECIMALS:
        digit = f"{10.0**-decimals:.{decimals}f}"
        return "cannot tell", f"a log prints {decimals} decimals: nothing below {digit} can be seen"
    for run in runs:
        missing = [place for place in PARITY_FIELDS.split() if field_of(run, place) is None]
        if run.run is None or missing:
            words = ", ".join(map(label_of, missing[:3])) + ", …" * (len(missing) > 3)
            return "cannot tell", f"{run.path} has no Run record that says {words}"
    for kind, gaps in kinds.items():
        if not gaps:
            return "cannot tell", f"not all logs have the {kind} (after the same steps)"
    ratios = ", ".join(f"{kind} {worst(gaps).ratio:.2g}" for kind, gaps in kinds.items())
    return "equal", f"the largest differences are within {FACTOR:g} × their floors: {ratios} ×"


TABLE_HEAD = (
    "| configuration | largest loss difference | floor | relative grad-norm difference | floor "
    "| relative weight difference | floor | most floors, of what | moved | narrow floor "
    "| verdict |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def format_row(name: str, comparison: Comparison) -> str:
    """One row of the markdown table under ``TABLE_HEAD``; a floor is the one at that place.

    The narrow floor: at how many of the steps (`Comparison.num_sharp`).
    """
    cells = []
    kinds = (comparison.losses, comparison.grad_norms, comparison.weights)
    for gaps in (*kinds[:2], kinds[2][:1]):
        gap = largest(gaps) if gaps else None
        cells += [f"{gap.difference:.2e}", f"{gap.floor:.2e}"] if gap else ["n/a", "n/a"]
    names = ("loss", "grad norm", "weights")
    ratios = [(worst(gaps).ratio, name) for gaps, name in zip(kinds, names, strict=True) if gaps]
    cells += ["{:.3g}, {}".format(*max(ratios)) if ratios else "n/a"]
    moved = comparison.moved_share
    cells += ["n/a" if moved is None else f"{100 * moved:.0f} %"]
    cells += [f"{comparison.num_sharp} of {len(comparison.losses)} steps", comparison.verdict]
    return f"| {' | '.join([name, *cells])} |"
