"""The frame of every report: one HTML file that needs nothing beside itself."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from equilibria.report.figures import ThemedFigure

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --page: #f6f8fa; --card: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d9dfe5;
  --accent: #2563eb; --good: #1a7f37; --bad: #cf222e; --heat: 37, 99, 235; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --card: #181d24; --ink: #e2e8ef;
  --soft: #9aa5b1; --line: #2d353f; --accent: #7aa7ff; --good: #57c76f; --bad: #ff7b72;
  --heat: 122, 167, 255; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; }
p { margin: 0 0 .8rem; } p:last-child { margin-bottom: 0; }
.lead, figcaption, .note { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .75rem;
  padding: 1.4rem 1.5rem; margin-top: 1.25rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1rem;
  margin-top: 1.5rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .75rem;
  padding: 1rem 1.2rem; }
.tile b { display: block; font-size: 1.7rem; font-weight: 650; line-height: 1.2; }
.tile span { color: var(--soft); font-size: .85rem; }
.formula { font-family: "STIX Two Math", "Cambria Math", "DejaVu Serif", Georgia, serif;
  font-size: 1.12rem; text-align: center; margin: .9rem 0; padding: .8rem 1rem; overflow-x: auto;
  background: var(--page); border-radius: .5rem; white-space: pre-wrap; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: .88rem; margin-top: .5rem; }
.gallery { display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fill, minmax(8.6rem, 1fr)); }
.exhibit { border: 1px solid var(--line); border-radius: .5rem; overflow: hidden;
  font-size: .82rem; }
.exhibit.wrong { border-color: var(--bad); }
.exhibit img { width: 100%; aspect-ratio: 1; display: block; image-rendering: pixelated; }
.exhibit div { padding: .45rem .6rem .55rem; line-height: 1.4; }
.exhibit b { font-size: .95rem; } .right b { color: var(--good); } .wrong b { color: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.facts { width: 100%; } .facts th { text-align: left; font-weight: 400; color: var(--soft); }
.facts td { text-align: right; } .facts th, .facts td { padding: .42rem 0;
  border-bottom: 1px solid var(--line); }
.facts tr:last-child > * { border-bottom: 0; }
.scroll { overflow-x: auto; }
.confusion { margin: 0 auto; } .confusion td, .confusion th { width: 2.9rem; height: 2.4rem;
  text-align: center; font-weight: 400; }
.confusion th { color: var(--soft); } .confusion td { border: 1px solid var(--card);
  border-radius: .35rem; }
.confusion .zero { color: var(--line); } .confusion .miss { color: var(--bad); font-weight: 700; }
footer { color: var(--soft); font-size: .85rem; margin-top: 1.5rem; text-align: center; }
@media print { body { background: none; } section, .tile { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<header><h1>$title</h1><p class="lead">$lead</p></header>
$body
<footer>$footer</footer>
</main>
</body>
</html>
""")


def page(*, title: str, lead: str, body: Iterable[str], footer: str) -> str:
    """A whole page. `body` is HTML, the rest is text."""
    return _PAGE.substitute(
        title=escape(title), lead=escape(lead), body="\n".join(body), footer=escape(footer)
    )


def section(title: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(content) + "\n</section>"


def paragraph(text: str, kind: str = "") -> str:
    attribute = f' class="{escape(kind)}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """A few numbers to be seen first, as (label, value)."""
    each = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in facts
    )
    return f'<div class="tiles">{"".join(each)}</div>'


def fact_table(rows: Sequence[tuple[str, str]]) -> str:
    cells = (
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(value)}</td></tr>'
        for label, value in rows
    )
    return f'<table class="facts">{"".join(cells)}</table>'


def figure(picture: ThemedFigure, *, alternative: str, caption: str) -> str:
    return (
        '<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{data_uri(picture.dark, "image/svg+xml")}">'
        f'<img src="{data_uri(picture.light, "image/svg+xml")}" alt="{escape(alternative)}">'
        f"</picture><figcaption>{escape(caption)}</figcaption></figure>"
    )


def data_uri(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
