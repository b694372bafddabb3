from __future__ import annotations

from collections.abc import Sequence
from html import escape

from decant.bench.reports.chart import Chart

_STYLE = """body{font:15px/1.5 Helvetica,Arial,sans-serif;color:#212529;max-width:1180px;margin:2em auto;padding:0 1em}
.charts{display:flex;flex-wrap:wrap;gap:1em}svg{width:560px;max-width:100%;font-family:inherit}
table{border-collapse:collapse;margin-top:1em}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #dee2e6}
caption,th:first-child{text-align:left}caption{font-weight:bold;white-space:nowrap}
.answer{font-size:1.25em;font-weight:bold}"""


def page(title: str, answer: str, charts: Sequence[Chart], tables: Sequence[str], note: str = "") -> str:
    """Make a page; `tables` come from `table`, all other text is escaped."""
    note = f"<p>{escape(note)}</p>\n" if note else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="answer">{escape(answer)}</p>\n{note}<div class="charts">'
        + "\n".join(chart.svg() for chart in charts)
        + "</div>\n"
        + "\n".join(tables)
        + "\n</body></html>\n"
    )


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = [
        f"<tr><th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    ]
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<table>{title}<tr>{names}</tr>\n" + "\n".join(body) + f"</table>{below}"
