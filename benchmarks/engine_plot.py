"""The law of the step time as a picture; used by benchmarks/engine_limits.py."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT, EDGE = 640, 400, 48
COLOURS = ("#1b6ca8", "#c0562f", "#3b8f4a", "#7d4fa0")


def step_time_svg(points: Sequence[tuple[int, int, float]], law: Sequence[float]) -> str:
    """SVG: points (batch, context, milliseconds), and for each context the line of a + b * batch + c * tokens, where
    `law` is a, b and c in milliseconds."""
    a, b, c = law
    right = max(batch for batch, _, _ in points)
    top = 1.05 * max(time for _, _, time in points)

    def place(batch: float, time: float) -> str:
        x = EDGE + batch / right * (WIDTH - 2 * EDGE)
        return f"{x:.1f},{HEIGHT - EDGE - time / top * (HEIGHT - 2 * EDGE):.1f}"

    marks = []
    for index, context in enumerate(sorted({context for _, context, _ in points})):
        colour = COLOURS[index % len(COLOURS)]
        own = [(batch, time) for batch, length, time in points if length == context]
        last = max(batch for batch, _ in own)
        ends = f"{place(0, a)} {place(last, a + b * last + c * last * context)}"
        marks.append(f'<polyline points="{ends}" stroke="{colour}" fill="none"/>')
        for batch, time in own:
            x, y = place(batch, time).split(",")
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        marks.append(f'<text x="{EDGE + 12}" y="{EDGE + 16 * index}" fill="{colour}">context {context}</text>')
    axes = f'<polyline points="{place(0, top)} {place(0, 0)} {place(right, 0)}" stroke="black" fill="none"/>'
    x, y = place(right, 0).split(",")
    said = f"a step, ms; lines: {a:.2f} + {b:.3f} batch + {1e3 * c:.3f} / 1000 tokens"
    labels = (
        f'<text x="{EDGE}" y="{EDGE - 20}">{said}</text>'
        f'<text x="{x}" y="{HEIGHT - EDGE + 20}" text-anchor="end">batch {right}</text>'
        f'<text x="{EDGE - 6}" y="{EDGE + 4}" text-anchor="end">{top:.0f}</text>'
    )
    size = f"0 0 {WIDTH} {HEIGHT}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', axes, labels, *marks, "</svg>"]) + "\n"
