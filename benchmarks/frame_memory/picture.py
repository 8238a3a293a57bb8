"""Bars as SVG, written by hand: it is shown by GitHub and by the site, in light and in dark."""

from collections.abc import Sequence

WIDTH, HEIGHT = 720, 380
LEFT, TOP, BOTTOM = 64, 58, 52
CARDS = {"V100, T4: 16 GB": 15.5, "RTX 4090: 24 GB": 23.5, "A100: 40 GB": 39.4}
FONT = "font-family='Helvetica, Arial, sans-serif'"


def picture(gpus: Sequence[int], plain: Sequence[float], recompute: Sequence[float]) -> str:
    """Two bars for each number of GPUs, and lines where cards end; GiB upwards."""
    high = 10 * (int(max(plain)) // 10 + 1)
    floor, room = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP

    def y(gib: float) -> float:
        return round(floor - room * gib / high, 1)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' {FONT} font-size='13' role='img'>",
        "<title>GiB of one GPU when 1, 2, 4 or 8 GPUs share each frame</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>",
        f"<text x='{LEFT - 44}' y='22' font-size='15' font-weight='bold' fill='#222'>One GPU's memory, when several "
        "share each frame</text>",
        f"<text x='{LEFT - 44}' y='42' fill='#555'>ConvNeXt-XL, seven camera frames of 512 x 2048, bf16, AdamW; "
        "predicted, GiB</text>",
    ]
    for gib in range(0, high + 1, 10):
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - 20}' y1='{y(gib)}' y2='{y(gib)}' stroke='#e4e4e4'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{y(gib) + 4}' text-anchor='end' fill='#555'>{gib}</text>")
    for name, gib in CARDS.items():
        if gib < high:
            line = f"x1='{LEFT}' x2='{WIDTH - 20}' y1='{y(gib)}' y2='{y(gib)}'"
            parts.append(f"<line {line} stroke='#c0392b' stroke-dasharray='5 4'/>")
            where = f"x='{WIDTH - 22}' y='{y(gib) - 5}' text-anchor='end'"
            parts.append(f"<text {where} fill='#c0392b' font-size='12'>{name}</text>")
    step = (WIDTH - LEFT - 150) / len(gpus)
    for number, (n, whole, again) in enumerate(zip(gpus, plain, recompute, strict=True)):
        x = LEFT + 16 + number * step
        for gib, offset, colour in ((whole, 0, "#2c6fbb"), (again, 50, "#9cc3e8")):
            box = f"x='{x + offset:.0f}' y='{y(gib)}' width='46' height='{floor - y(gib):.1f}'"
            parts.append(f"<rect {box} fill='{colour}'/>")
            label = f"x='{x + offset + 23:.0f}' y='{y(gib) - 5}' text-anchor='middle'"
            parts.append(
                f"<text {label} fill='#222' stroke='#fff' stroke-width='4' paint-order='stroke'>{gib:.1f}</text>"
            )
        label = f"x='{x + 48:.0f}' y='{floor + 18}' text-anchor='middle'"
        parts.append(f"<text {label} fill='#222'>{n} GPU{'s' * (n > 1)}</text>")
    for text, x, colour in (("as it is", LEFT + 16, "#2c6fbb"), ("with recompute", LEFT + 106, "#9cc3e8")):
        parts.append(f"<rect x='{x}' y='{HEIGHT - 20}' width='12' height='12' fill='{colour}'/>")
        parts.append(f"<text x='{x + 18}' y='{HEIGHT - 9}' fill='#222'>{text}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"
