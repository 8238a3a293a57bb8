"""What `plan` returns: a list of plans that shows itself as a table in a notebook."""

from collections.abc import Iterator
from html import escape

from fullframe.planning.ranking import Plan, by_category
from fullframe.strategy import describe
from fullframe.wording import GIB, figure

_SHOWN = 12  # rows of plans that were simulated
_KINDS = {"parameter": "#4c78a8", "gradient": "#72b7b2", "optimizer": "#54a24b", "activation": "#f58518"}
_OTHER = "#bab0ac"
_STYLE = (
    "<style>.fullframe-plans td,.fullframe-plans th{text-align:left!important;padding:2px 8px;vertical-align:middle}"
    ".fullframe-plans td.n,.fullframe-plans th.n{text-align:right!important;font-variant-numeric:tabular-nums}"
    ".fullframe-plans .bar{display:flex;width:160px;height:12px;background:rgba(128,128,128,.2)}"
    ".fullframe-plans .no{opacity:.6}.fullframe-plans i{display:inline-block;width:10px;height:10px}</style>"
)


class Plans(list[Plan]):
    """Plans, the best first; an ordinary list that a notebook shows as a table.

    A row is a strategy that was simulated: the bytes of one device in GiB, with a bar of what they are made of that is
    full where the device is, what is left of them, milliseconds a step and samples a second of the whole job.
    """

    def _repr_html_(self) -> str:
        return f'{_STYLE}<div class="fullframe-plans">{"".join(self._lines())}</div>'

    def _lines(self) -> Iterator[str]:
        simulated = [plan for plan in self if plan.prediction is not None]
        if not self:
            yield "<p>no plans</p>"
            return
        limit, batch = self[0].memory_bytes / GIB, self[0].batch_size
        best = describe(self[0].strategy) if self[0].fits else "none of these fits"
        yield (
            f"<p><b>{escape(self[0].devices)}</b>, batch size {batch}, {limit:.2f} GiB of each to be used. "
            f"Fastest: <b>{escape(best)}</b>. {len(self)} strategies, {len(simulated)} simulated.</p>"
        )
        yield '<table><thead><tr><th></th><th>strategy</th><th class="n">GiB</th><th>of what</th>'
        yield '<th class="n">free</th><th class="n">ms/step</th><th class="n">samples/s</th><th>why</th></tr>'
        yield "</thead><tbody>"
        for number, plan in enumerate(simulated[:_SHOWN], start=1):
            yield _row(number, plan)
        yield "</tbody></table><p>"
        yield " ".join(
            f'<i style="background:{colour}"></i> {kind}' for kind, colour in [*_KINDS.items(), ("other", _OTHER)]
        )
        if len(simulated) > _SHOWN:
            yield f"; {len(simulated) - _SHOWN} more that were simulated are in the list"
        yield "</p>"


def _row(number: int, plan: Plan) -> str:
    prediction = plan.prediction
    assert prediction is not None
    known = by_category(prediction)
    parts = {kind: known.get(kind, 0) for kind in _KINDS}
    parts["other"] = max(prediction.device_bytes - sum(parts.values()), 0)
    whole = max(plan.memory_bytes, prediction.device_bytes)
    bar = "".join(
        f'<span title="{kind} {bytes / GIB:.2f} GiB" '
        f'style="width:{100 * bytes / whole:.2f}%;background:{_KINDS.get(kind, _OTHER)}"></span>'
        for kind, bytes in parts.items()
    )
    cells = [
        ("", str(number) if plan.fits else ""),
        ("", escape(describe(plan.strategy))),
        ("n", f"{prediction.device_bytes / GIB:.2f}"),
        ("", f'<div class="bar">{bar}</div>'),
        ("n", f"{(plan.headroom_bytes or 0) / GIB:.2f}"),
        ("n", figure(1e3 * prediction.step_seconds)),
        ("n", figure(plan.samples_per_second or 0.0)),
        ("", escape(plan.reason)),
    ]
    row = "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells)
    return f'<tr class="{"yes" if plan.fits else "no"}">{row}</tr>'
