"""The comparison as one HTML page: verdicts in words first, then figures and tables.

Everything is inside the file: styles, figures as SVG, no script, no address of another place. It follows the reader's
light or dark setting, prints, and is read on a phone: figures stack, wide tables scroll inside their own box.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from lightning_fuse.reports.charts import Chart, charts_of
from lightning_fuse.reports.comparison import Comparison
from lightning_fuse.reports.style import STYLE
from lightning_fuse.reports.svg import COLOURS, svg
from lightning_fuse.reports.tables import NONE, Table, budget_table, group_table, run_table, shown_columns, target_table
from lightning_fuse.reports.verdict import Verdict

# The word on a verdict's badge, and the badge's colour.
BADGES = {
    "same": ("same quality", "good"),
    "better": ("better", "good"),
    "worse": ("worse", "bad"),
    "diverged": ("diverged", "bad"),
    "failed": ("failed", "bad"),
    "unsettled": ("not settled", "open"),
    "unknown": ("not known", "open"),
    "incomparable": ("other data", "open"),
}
MOST_NOTES = 12  # shown before the rest is folded away
BUDGETS = (
    "What each had reached when all had come equally far: the last validation by then, nothing interpolated. "
    "At equal seconds a faster step counts, at equal updates it does not."
)


def page(comparison: Comparison, title: str | None = None) -> str:
    """The whole page.

    Args:
        comparison: What to show.
        title: The heading; None names the recipe and the baseline.

    Returns:
        HTML, complete in itself.
    """
    heading = title or f"{comparison.recipe}: {len(comparison.groups)} configurations compared"
    figures = "".join(_figure(chart) for chart in charts_of(comparison))
    body = [
        f"<header><h1>{escape(heading)}</h1><p class='lead'>{_lead(comparison)}</p></header>",
        _verdicts(comparison),
        _section("figures", "Figures", f"{_legend(comparison)}<div class='figures'>{figures}</div>"),
        _section("configurations", "Configurations", _table(group_table(comparison))),
    ]
    targets = target_table(comparison)
    if targets.rows:
        body.append(_section("targets", targets.title, _table(targets)))
    if comparison.budgets:
        table = budget_table(comparison)
        body.append(_section("budgets", table.title, f"<p class='aside'>{BUDGETS}</p>{_table(table)}"))
    body += [
        _section("runs", "Runs", _table(run_table(comparison))),
        _section("notes", "Notes", _notes(comparison)),
        _section("made-with", "Hardware and versions", _provenance(comparison)),
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n<link rel='icon' href='data:,'>\n"
        f"<title>{escape(heading)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"
    )


def _lead(comparison: Comparison) -> str:
    count, seeds = (
        len(comparison.runs),
        sorted({seed for g in comparison.groups for seed in g.seeds if seed is not None}),
    )
    said = f"{count} run{'s' if count != 1 else ''} of {escape(comparison.recipe)}"
    if seeds:
        said += f" with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    better = "lower" if comparison.mode == "min" else "higher"
    return (
        f"{said}. Baseline: <strong>{escape(comparison.baseline.label)}</strong>. "
        f"Quality is <strong>{escape(comparison.metric)}</strong> at the end, {better} is better."
    )


def _verdicts(comparison: Comparison) -> str:
    cards = "".join(_card(verdict, colour % COLOURS) for colour, verdict in enumerate(comparison.verdicts, start=1))
    band = next((note for note in comparison.notes if note.startswith(("the band", "the baseline"))), "")
    text = f"<p class='aside'>{escape(_sentence(band))} “Same” means: no further apart than that; it is no proof.</p>"
    if not cards:
        cards = "<p>There is one configuration only, and so nothing to compare it with.</p>"
    return _section("verdicts", "Verdicts", f"<div class='cards'>{cards}</div>{text}")


def _card(verdict: Verdict, colour: int) -> str:
    word, kind = BADGES[verdict.outcome]
    first, *rest = verdict.sentences
    items = "".join(f"<li>{escape(_upper(sentence))}</li>" for sentence in rest)
    items += "".join(f"<li class='caution'>{escape(_upper(caution))}</li>" for caution in verdict.cautions)
    return (
        f"<article class='card {kind}' style='--ink:var(--c{colour})'><h3><span class='swatch'></span>"
        f"{escape(verdict.label)} <span class='badge'>{word}</span></h3>"
        f"<p>{escape(_sentence(first))}</p><ul>{items}</ul></article>"
    )


def _legend(comparison: Comparison) -> str:
    chips = "".join(
        f"<li style='--ink:var(--c{colour % COLOURS})'><span class='swatch'></span>{escape(group.label)}"
        f"{' (baseline)' if not colour else ''}</li>"
        for colour, group in enumerate(comparison.groups)
    )
    return f"<ul class='legend'>{chips}</ul>"


def _figure(chart: Chart) -> str:
    caption = f"<strong>{escape(chart.title)}</strong> {escape(chart.caption)}"
    return f"<figure><figcaption>{caption}</figcaption>{svg(chart)}</figure>"


def _table(table: Table) -> str:
    shown = shown_columns(table)
    kinds = {index: "words" if index in table.text else "figure" for index in shown}
    head = "".join(f"<th class='{kinds[i]}' scope='col'>{escape(table.heads[i])}</th>" for i in shown)
    rows = "".join(f"<tr>{''.join(_cell(row[i], i, kinds[i], table) for i in shown)}</tr>" for row in table.rows)
    return (
        f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(table.title, quote=True)}'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str, index: int, kind: str, table: Table) -> str:
    if index == 0:
        return f"<th class='words' scope='row'>{escape(text)}</th>"
    long = " long" if table.heads[index] == "remarks" and text != NONE else ""
    return f"<td class='{kind}{long}'>{escape(text)}</td>"


def _notes(comparison: Comparison) -> str:
    items = [f"<li>{escape(_sentence(note))}</li>" for note in comparison.notes]
    shown, folded = items[:MOST_NOTES], items[MOST_NOTES:]
    text = f"<ul>{''.join(shown)}</ul>"
    if folded:
        text += f"<details><summary>{len(folded)} more</summary><ul>{''.join(folded)}</ul></details>"
    return text


def _provenance(comparison: Comparison) -> str:
    """Each value that a run recorded; several where runs differ."""
    manifests = [run.manifest for run in comparison.runs]
    rows: list[tuple[str, str]] = []
    for name, key in (("CPU", "cpu"), ("usable cores", "usable_cores"), ("system", "system"), ("GPUs", "gpus")):
        values = _different(_plain((m.get("hardware") or {}).get(key)) for m in manifests)
        if values:
            rows.append((name, values))
    packages = sorted({name for m in manifests for name in m.get("versions") or {}})
    for package in packages:
        rows.append((package, _different(str((m.get("versions") or {}).get(package, "")) for m in manifests)))
    rows.append(("revision", _different(str((m.get("git") or {}).get("revision", ""))[:12] for m in manifests)))
    rows.append(("started", _first_to_last(sorted(str(m.get("started", "")) for m in manifests))))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows if value)
    return f"<dl>{cells}</dl>"


def _first_to_last(times: list[str]) -> str:
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def _different(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _section(name: str, title: str, content: str) -> str:
    return f"<section id='{name}'><h2>{escape(title)}</h2>{content}</section>"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    """Begins large and ends with a full stop; metric names keep their case."""
    if not text:
        return ""
    begun = text if "/" in text.split(" ", 1)[0] else _upper(text)
    return begun if begun.endswith((".", ")")) and not begun.endswith(")") else f"{begun}."
