"""What came of a run, by op: the summary that is printed, and the page `docs/ops.md`."""

import datetime
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import fullframe

DOCUMENT = Path(__file__).parents[2] / "docs" / "ops.md"
FAULTS = ("wrong", "disagree", "hang", "foreign")
REASONS = 3  # shown of one op
KINDS = ("exact", "in part", "refused")

INTRODUCTION = """# Ops

Every op and module of torch's own database (`torch.testing._internal`: `op_db` and `module_db`) on its own samples,
split over gloo ranks, against plain torch: `python -m tests.whole.opinfo --write` makes this page, told to take one
sample of each kind of case, where 24 are its default. Compared are
values, shapes, dtypes, `requires_grad`, the gradients of all inputs and parameters, buffers, and the arguments after
the call; as functions, methods, operators, in place, with `out=`, and by writing into the result or the argument
afterwards; with infinities and NaN put into what is split, in other dtypes, with only some operands split, with
`unsupported="gather"`, and with what torch refuses. Noise is compared as any value is; dropout, and what holds it, in
shape and dtype, and in what is whole: each shard draws its own.

An op has an *image-like sample* when a tensor of at least two dims among its arguments can be cut over the ranks
of the mesh in its last two, as `ff.shard` does. These ops are listed. What counts in the table are the samples as
torch draws them, in float64 (or the nearest dtype that the op has), with all such tensors split or, as the weight
of a convolution is whole in any model, the first of them alone; a sample is exact when one of the two is:

- **exact**: on every such sample on every mesh, the numbers of plain torch (float64: 1e-9 of the largest value).
- **in part**: exact on some, refused by name (`UnsupportedOp`, on all ranks alike) on others.
- **refused**: by name on all. Most of these are linear algebra, transforms, searches and counts over the image plane,
  or take a small matrix for an image, whose rows and columns the sample then wants whole.

`unsupported="gather"` runs what is refused on the whole tensor.
"""


def op_counts(results: Iterable[Any]) -> dict[str, Counter[str]]:
    """How many samples of each entry are exact, refused, or faulty, as the page's introduction says."""
    verdicts: dict[str, dict[Any, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        case = r.case
        if (case["call"], case["values"], case["gather"]) != ("function", "given", False) or not case["main"]:
            continue
        if r.verdict != "skipped" and case["split"] in ("all", "first"):
            verdicts[r.entry][r.mesh, case["sample"]][case["split"]] = r.verdict
    return {name: Counter(map(_of_sample, by_sample.values())) for name, by_sample in verdicts.items()}


def _of_sample(by_split: dict[str, str]) -> str:
    faults = [verdict for verdict in by_split.values() if verdict in FAULTS]
    return faults[0] if faults else "exact" if "exact" in by_split.values() else "refused"


def kind_of(counts: Counter[str]) -> str:
    """exact, in part or refused; a fault counts as none of them."""
    if any(counts[fault] for fault in FAULTS):
        return "faulty"
    return KINDS[0] if not counts["refused"] else KINDS[1] if counts["exact"] else KINDS[2]


def summary(results: Sequence[Any]) -> dict[str, Any]:
    """Counts of the whole run, and for each op with an image-like sample its kind and its counts."""
    by_op = op_counts(results)
    kinds = Counter(kind_of(counts) for counts in by_op.values())
    return {
        "torch": torch.__version__,
        "fullframe": fullframe.__version__,
        "meshes": sorted({f"{r.mesh[0]}x{r.mesh[1]}" for r in results}),
        "cases": len(results),
        "verdicts": dict(Counter(r.verdict for r in results)),
        "ops": {name: {"kind": kind_of(counts), **counts} for name, counts in by_op.items()},
        "kinds": dict(kinds),
        "random": sorted({r.entry for r in results if r.detail == "random"}),
    }


def write_document(results: Sequence[Any]) -> None:
    """Write `docs/ops.md`."""
    DOCUMENT.write_text(document(results))


def document(results: Sequence[Any]) -> str:
    """The page's text."""
    facts, by_op = summary(results), op_counts(results)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for r in results:
        if r.verdict == "refused" and r.case["values"] == "given":
            reasons[r.entry][r.detail.partition(": ")[2].replace("|", "\\|")] += 1
    total = len(by_op)
    shares = ", ".join(f"{facts['kinds'].get(kind, 0)} {kind}" for kind in KINDS)
    verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(facts["verdicts"].items()))
    lines = [
        INTRODUCTION,
        f"**{total} ops and modules with an image-like sample: {shares}.** {len(results):,} cases on the meshes "
        f"{', '.join(facts['meshes'])} (height x width): {verdicts}. torch {facts['torch']}, "
        f"fullframe {facts['fullframe']}, {datetime.date.today().isoformat()}.\n",
    ]
    for kind in ("faulty", *KINDS):
        names = sorted(name for name, counts in by_op.items() if kind_of(counts) == kind)
        if names:
            lines += [f"## {kind.capitalize()} ({len(names)})\n", *_table(names, by_op, reasons, kind != "exact"), ""]
    lines += [
        "## Ops without values of their own\n",
        "Drawn by each shard, or unset; compared in shape and dtype only: " + ", ".join(facts["random"]) + ".",
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(
    names: Sequence[str], by_op: dict[str, Counter[str]], reasons: dict[str, Counter[str]], with_reasons: bool
) -> list[str]:
    if not with_reasons:
        return ["| op | samples |", "|---|---|", *(f"| {name} | {by_op[name].total()} |" for name in names)]
    lines = ["| op | exact | refused | why |", "|---|---|---|---|"]
    for name in names:
        most = [reason for reason, _ in reasons[name].most_common(REASONS)]
        more = f" (and {len(reasons[name]) - REASONS} more)" if len(reasons[name]) > REASONS else ""
        lines.append(f"| {name} | {by_op[name]['exact']} | {by_op[name]['refused']} | {'; '.join(most)}{more} |")
    return lines
