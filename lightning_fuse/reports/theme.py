"""Colours, dashes and shapes of the figures, light and dark.

A series is told by its colour and by its dashes or its shape. The palettes keep apart under simulated deuteranopia,
protanopia and tritanopia, and each stands out from its paper; the page takes the one that fits the reader's theme.
"""

from __future__ import annotations

from typing import Any

# The first is the baseline's. Distances are tested in tests/reports/test_charts.py.
PALETTES = {
    "light": ["#4a4f57", "#650cfe", "#fe4710", "#2b9f6a", "#cd70bb", "#680602", "#ab6ff5", "#710180"],
    "dark": ["#c9ced6", "#6b99f8", "#fbc005", "#0cfc90", "#e61c04", "#9d4588", "#9700fc", "#c34150"],
}
PAPER = {"light": "#ffffff", "dark": "#15181d"}
INK = {"light": "#1d2127", "dark": "#e7eaee"}
DASHES = [[1, 0], [7, 3], [2, 3], [9, 3, 2, 3], [12, 3], [4, 2], [2, 2, 6, 2], [1, 3]]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]


def dash_of(place: int) -> list[int]:
    """The dashes of a series; with more series than colours the same colour comes back with others."""
    return DASHES[(place + place // len(DASHES)) % len(DASHES)]


def theme(mode: str) -> dict[str, Any]:
    """Vega's configuration of a theme, "light" or "dark"."""
    ink, grid = INK[mode], "#8884"
    axis = {"labelColor": ink, "titleColor": ink, "gridColor": grid, "domainColor": "#888", "tickColor": "#888"}
    return {
        "background": PAPER[mode],
        "font": "system-ui, sans-serif",
        "range": {"category": PALETTES[mode], "symbol": SHAPES},
        "axis": {**axis, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 260},
        "view": {"stroke": None},
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": ink},
    }
