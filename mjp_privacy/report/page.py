"""table.html: the tables, pictures and notes on one page, without scripts or external files.

The pictures lie beside the page and are linked by relative paths: a table of thirty lines has some
30 MB of them, too much to embed in a page that a phone should open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from mjp_privacy.report.export import HEADING
from mjp_privacy.report.notes import Section
from mjp_privacy.report.published import CITATION
from mjp_privacy.report.views import TextTable

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5d6b76; --rule: #d5dce2;
  --band: #f4f6f8; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ec; --muted: #9aa8b3; --rule: #36424c;
  --band: #1c242b; --paper: #12181d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.2rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: .4rem 0; }
h2 { font-size: 1.12rem; margin: 2.4rem 0 .5rem; }
p, li, figcaption { max-width: 50rem; overflow-wrap: anywhere; }
.muted, figcaption, caption { color: var(--muted); font-size: .88rem; }
li { margin: .3rem 0; }
.scroll { overflow-x: auto; border-block: 1px solid var(--rule); }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .65rem; text-align: left; white-space: nowrap; vertical-align: top; }
th { border-bottom: 1px solid var(--rule); font-weight: 600; }
tbody tr, thead tr { background: var(--paper); }
tbody tr:nth-child(even) { background: var(--band); }
.r { text-align: right; }
td.long { white-space: normal; min-width: 18rem; overflow-wrap: anywhere; }
.scroll th:nth-child(2), .scroll td:nth-child(2) { position: sticky; left: 0; z-index: 1;
  background: inherit; white-space: normal; min-width: 7rem; max-width: 12rem;
  overflow-wrap: anywhere; }
figure { margin: 1.4rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 3px; }
"""

LONG = 48  # a table cell with more characters wraps


@dataclass(frozen=True)
class Image:
    """A picture beside the page; `path` is relative to it, with forward slashes."""

    path: str
    caption: str


def html_page(
    tables: Sequence[TextTable], images: Sequence[Image], notes: Sequence[Section]
) -> str:
    """The whole page. Everything that came from a run is escaped."""
    body = [
        f"<h1>{escape(HEADING)}</h1>",
        f'<p class="muted">{escape(CITATION)}</p>',
        *map(html_table, tables),
        *(["<h2>Pictures</h2>"] if images else []),
        *map(html_figure, images),
        *map(html_section, notes),
    ]
    return "\n".join(
        [
            *("<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">'),
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            *(f"<title>{escape(HEADING)}</title>", f"<style>{STYLE}</style>", "</head>", "<body>"),
            *body,
            *("</body>", "</html>", ""),
        ]
    )


def html_table(table: TextTable) -> str:
    """One table with its heading and caption."""
    head = "".join(
        _cell("th", cell, side) for cell, side in zip(table.header, table.align, strict=True)
    )
    rows = (
        "".join(_cell("td", cell, side) for cell, side in zip(row, table.align, strict=True))
        for row in table.rows
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<section>\n<h2>{escape(table.title)}</h2>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
        f'<p class="muted">{escape(table.caption)}</p>\n</section>'
    )


def _cell(tag: str, text: str, side: str) -> str:
    classes = (["r"] if side == "r" else []) + (["long"] if len(text) > LONG else [])
    attribute = f' class="{" ".join(classes)}"' if classes else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


def html_figure(image: Image) -> str:
    """One picture with its caption, loaded when it scrolls into view."""
    source, caption = escape(quote(image.path)), escape(image.caption)
    return (
        f'<figure>\n<img src="{source}" alt="{caption}" loading="lazy">\n'
        f"<figcaption>{caption}</figcaption>\n</figure>"
    )


def html_section(section: Section) -> str:
    """A heading and its notes as a list."""
    items = "\n".join(f"<li>{escape(item)}</li>" for item in section.items)
    return f"<section>\n<h2>{escape(section.title)}</h2>\n<ul>\n{items}\n</ul>\n</section>"
