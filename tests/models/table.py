"""Every architecture on split ranks against one process: `python -m tests.models.table --help`.

Prints the table of `docs/models.md`, or writes that file. Exits with 1 when any number is wrong.
"""

import argparse
import datetime
import json
import math
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

import fullframe
from tests.models.architectures import GROUPS, TOLERANCE
from tests.models.comparison import Outcome, verdicts_of
from tests.models.elsewhere import installed

MESHES = ((1, 2), (2, 2))
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
SHOWN = 2  # modules of a gathered op in the table; --json has all

Outcomes = dict[tuple[int, ...], Outcome]

INTRODUCTION = """# Models

One forward and backward in train mode on split images, in float64 with drop rates at zero, against one process: the
loss, every parameter's gradient and every buffer. The models are what `transformers` ships, built from small
configurations (few channels and blocks, every feature of the family) and not edited, and networks written by hand as
users write them. Sizes are height x width of the image; a mesh is height x width in ranks.

- **exact**: nothing differs by more than 1e-9 of the largest value in its tensor. The figure is the largest difference
  found. Tensors below a thousandth of the model's largest gradient (or buffer) are measured against that thousandth:
  sums that cancel (a bias before a normalization, say) hold the rounding noise of much larger terms.
- **with gather**: exact as well, but at the named modules a tensor was made whole on every rank, as
  `parallelize(model, mesh, unsupported="gather")` allows and says in a warning. The rest of the model stays split.
- **split**: how much of what the model's innermost modules put out was split rather than whole on every rank, in
  elements. The rest is what is global by nature (pooled features, queries of a detector, a class head) and maps too
  small for their ranks; with images as small as these it weighs more than with a camera's.
- **refused**: `UnsupportedOp`, on all ranks, also with `unsupported="gather"`.
- **wrong**: other numbers, or an error that is not a refusal. There should be none.

Losses: a model's own for classification and segmentation, and where the row says so (detection and masks with their
matching); losses written by hand where the row says so; elsewhere the mean squared distance of its outputs from a fixed
uneven pattern.

Weights are drawn at random everywhere, because the zeros that some families start from would hide a wrong gradient.
"""

REMARKS = """## Remarks

- DINOv2, and Depth Anything on it, interpolate their position embeddings in float32 when the image has another size
  than the embeddings. Gradients of these embeddings are then equal to float32's precision only. The rows without a
  remark use images that need no interpolation.
- DAB-DETR takes the softmax of its attention in float32; with that in float64 its own loss is exact to 8e-15. D-FINE is
  missing among those trained on their own losses: its loss makes float32 tensors of float64 ones, so it cannot run in
  float64 even in one process.
- In losses that copy lists of masks into a whole tensor (MaskFormer, Mask2Former, EoMT) the masks stay whole.
- SuperPoint is compared up to its encoder: its keypoints are a list chosen by a threshold, which no
  gradient reaches.
- On eight ranks, 2x4 and 1x8 (by hand, 2026-11-28), all of the table are exact too, Mask2Former and OneFormer on 2x4
  with a gather: of their smallest level, which has fewer columns than there are ranks.
- Where timm or torchvision is installed this table has models of theirs too, of torchvision detectors with their
  losses. What models and losses of other published libraries showed, by scripts that are not kept, is in
  [the log](log.md#random-searches-and-published-code)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models.table", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument("--only", action="append", metavar="NAME", help="this architecture alone; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    chosen = parser.parse_args()
    if chosen.only and chosen.write:
        parser.error("--write needs the whole table; leave out --only")
    return chosen


def cell(outcome: Outcome, tolerance: float) -> str:
    """`exact 3e-15`, or the verdict in bold when it is none."""
    if not outcome.verdict.startswith("exact"):
        return f"**{outcome.verdict}**"
    verdict = outcome.verdict if tolerance == TOLERANCE else f"{outcome.verdict} but for float32"
    return f"{verdict.replace('exact with', 'with')} {outcome.error:.0e}"


def remark(outcomes: Outcomes) -> str:
    """Ops and where they were gathered, or why it was refused, each once over the meshes."""
    gathered: dict[str, list[str]] = {}
    reasons: list[str] = []
    for outcome in outcomes.values():
        for detail in outcome.details:
            if outcome.verdict != "exact with gather":
                reasons.append(detail)
                continue
            op, _, where = detail.partition(" (")
            places = gathered.setdefault(op.removeprefix("torch.").replace("nn.functional", "F"), [])
            place = where.removesuffix(")").split(" (")[0]
            if place not in places:
                places.append(place)
    parts = []
    for op, places in gathered.items():
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        parts.append(f"`{op}` in {', '.join(f'`{place}`' for place in places[:SHOWN])}{more}")
    reasons = [reason[:300].replace("|", "\\|").replace("\n", " ") for reason in dict.fromkeys(reasons)]
    return "; ".join(parts + reasons[:SHOWN])


def worst_verdict(outcomes: Outcomes) -> str:
    """The verdict over all meshes."""
    order = ("wrong", "refused", "exact with gather", "exact")
    return min((outcome.verdict for outcome in outcomes.values()), key=order.index)


def counted(results: dict[str, Outcomes]) -> str:
    """`70 architectures: 60 exact, ...`, each counted with its worst mesh."""
    counts = Counter(worst_verdict(outcomes) for outcomes in results.values())
    kinds = ("exact", "exact with gather", "refused", "wrong")
    return f"{len(results)} architectures: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def as_markdown(groups: dict, results: dict[str, Outcomes], missing: dict[str, str]) -> str:
    """The document from its data."""
    meshes = " | ".join(f"mesh {height}x{width}" for height, width in MESHES)
    lines = [INTRODUCTION, f"**{counted(results)}** (on the worse of the two meshes)."]
    for title, entries in groups.items():
        entries = [entry for entry in entries if entry.name in results]
        if not entries:
            continue
        lines += [
            f"\n## {title}\n",
            f"| architecture | size | {meshes} | split | gathered, or why not |",
            "|---|---|---|---|---|---|",
        ]
        for entry in entries:
            outcomes = results[entry.name]
            cells = " | ".join(cell(outcomes[mesh], entry.tolerance) for mesh in MESHES)
            size = f"{entry.size[0]}x{entry.size[1]}"
            split = min(outcome.split for outcome in outcomes.values())
            lines.append(f"| {entry.name} | {size} | {cells} | {split:.0%} | {remark(outcomes)} |")
    lines += ["", REMARKS]
    lines += [f"- {package} models are left out here: `{reason}`." for package, reason in missing.items()]
    lines.append(
        f"\nMade by `python -m tests.models.table --write` on {datetime.date.today()} with fullframe"
        f" {fullframe.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, gloo on CPU.\n"
    )
    return "\n".join(lines)


def as_json(results: dict[str, Outcomes], missing: dict[str, str]) -> str:
    """One object: the outcomes by architecture and mesh, and the packages left out."""
    rows = {
        name: {
            f"{height}x{width}": {
                **outcome._asdict(),
                "error": None if math.isnan(outcome.error) or math.isinf(outcome.error) else outcome.error,
            }
            for (height, width), outcome in outcomes.items()
        }
        for name, outcomes in results.items()
    }
    return json.dumps({"architectures": rows, "left_out": missing}, indent=2)


def main() -> int:
    """Runs what is asked for; 1 when a number is wrong."""
    chosen = arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    more, missing = installed()
    groups = {**GROUPS, **more}
    entries = {entry.name: entry for group in groups.values() for entry in group}
    unknown = sorted(set(chosen.only or ()) - entries.keys())
    if unknown:
        print(f"no architecture {unknown}; there are: {', '.join(entries)}", file=sys.stderr)
        return 2
    for package, reason in missing.items():
        print(f"{package} left out: {reason}", file=sys.stderr)
    results = {}
    for name in chosen.only or entries:
        results[name] = verdicts_of(name, MESHES)
        print(f"{name}: {', '.join(o.verdict for o in results[name].values())}", file=sys.stderr, flush=True)
    document = as_markdown(groups, results, missing)
    if chosen.write:
        DOCUMENT.write_text(document)
    print(as_json(results, missing) if chosen.json else counted(results) if chosen.write else document)
    return int(any(worst_verdict(outcomes) == "wrong" for outcomes in results.values()))


if __name__ == "__main__":
    sys.exit(main())
