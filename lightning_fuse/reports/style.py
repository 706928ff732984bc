"""The page's style sheet. Colours are told apart by people with any colour vision, on light and on dark."""

STYLE = """\
:root {
  --paper: #fbfbfa; --panel: #ffffff; --text: #1c1e21; --soft: #5c6370; --rule: #dfe1e4; --grid: #e9eaec;
  --shade: #1c1e2138; --good: #1a7f4b; --bad: #b3261e; --open: #8a5a00;
  --c0: #3b3f46; --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #b5539c; --c5: #a67c00; --c6: #4aa3df;
    --c7: #7d4cc2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181c; --panel: #1e2126; --text: #e7e8ea; --soft: #a3a9b3; --rule: #363b43; --grid: #2b2f36;
    --shade: #000000a0; --good: #5fd39a; --bad: #ff8a80; --open: #f2bf5e;
    --c0: #d3d6dc; --c1: #57b4f2; --c2: #ff9b57; --c3: #3fd0a4; --c4: #e58fcf; --c5: #e3c04d; --c6: #9ad2f7;
    --c7: #b79bf0;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--text); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 40px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 6px; display: grid; grid-template-columns: auto minmax(0, 1fr) auto; gap: 8px;
    align-items: center; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.lead { color: var(--soft); max-width: 46em; }
.lead strong { color: var(--text); font-weight: 600; }
.aside { color: var(--soft); font-size: 0.9rem; margin: 12px 0; max-width: 60em; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px; }
.card { background: var(--panel); border: 1px solid var(--rule); border-left: 5px solid var(--ink);
    border-radius: 8px;
  padding: 14px 16px; }
.card ul { margin: 8px 0 0; padding-left: 1.1em; color: var(--soft); font-size: 0.92rem; }
.card li.caution { color: var(--open); }
.swatch { width: 12px; height: 12px; border-radius: 3px; background: var(--ink); flex: none; }
.badge { font-size: 0.78rem; font-weight: 600; padding: 1px 9px; border-radius: 99px; border: 1px solid currentColor;
  margin-left: auto; white-space: nowrap; }
.good .badge { color: var(--good); } .bad .badge { color: var(--bad); } .open .badge { color: var(--open); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 0 0 14px; padding: 0;
    font-size: 0.92rem; }
.legend li { display: flex; align-items: center; gap: 7px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
    padding: 14px 14px 10px;
  min-width: 0; }
figcaption { font-size: 0.88rem; color: var(--soft); margin-bottom: 8px; min-height: 2.9em; }
figcaption strong { display: block; color: var(--text); font-size: 0.98rem; }
svg { display: block; width: 100%; height: auto; max-width: 540px; margin: 0 auto; font-size: 13px; }
svg text { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .bar-label, svg .bar-value { fill: var(--text); }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke: var(--ink); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.base { stroke-width: 5; stroke: color-mix(in srgb, var(--ink) 62%, var(--panel)); }
.area { fill: var(--ink); opacity: 0.07; stroke: none; }
.area.base { opacity: 0.2; }
.dot, .bar { fill: var(--ink); }
.track { fill: var(--grid); }
.range { fill: none; stroke: var(--text); stroke-width: 1.5; }
.skip { fill: none; stroke: var(--ink); stroke-width: 1.6; }
/* A shade at the side on which more of a table can be scrolled to: it stands still, and what covers it moves. */
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px; background:
    linear-gradient(to left, var(--panel) 14px, transparent) right / 30px 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 14px 100% no-repeat scroll, var(--panel); }
table { border-collapse: collapse; font-size: 0.88rem; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; border-bottom: 1px solid var(--grid); text-align: right; white-space: nowrap;
    vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.words { text-align: left; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--panel); }
td.long { white-space: normal; min-width: 420px; }
#notes ul { margin: 0; padding-left: 1.2em; font-size: 0.92rem; color: var(--soft); }
summary { cursor: pointer; color: var(--soft); margin-top: 6px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); gap: 8px 24px; margin: 0;
  font-size: 0.9rem; }
dl div { min-width: 0; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 560px) {
  main { padding: 18px 14px 48px; }
  h1 { font-size: 1.35rem; }
  figcaption { min-height: 0; }
  figure { padding: 12px 10px 8px; }
  tbody th { min-width: 34vw; max-width: 34vw; white-space: normal; overflow-wrap: anywhere; }
  th, td { padding: 6px 9px; }
}
@media print { .scroll { overflow: visible; } figure, .card { break-inside: avoid; } }
"""
