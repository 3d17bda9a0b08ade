"""What every page has around its content: a file that needs nothing else and runs nothing."""

from __future__ import annotations

import html
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page's own word to the browser that nothing is fetched and no script runs."""


def whole_page(title: str, eyebrow: str, *content: object, footer: str) -> Html:
    """A page with its heading; the footer says what it was made from."""
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{title}, {eyebrow}"),
        tag("style", Html(CSS)),
    )
    header = tag("header", tag("p", eyebrow, class_="eyebrow"), tag("h1", title))
    foot = tag("footer", f"Made by stobatch {footer}; nothing about training data was read.")
    body = tag("body", tag("main", header, *content, foot))
    return join([Html("<!doctype html>\n"), tag("html", head, body, lang="en")])


@cache
def templates() -> Environment:
    """The templates beside this file. Whatever they are given is escaped; a name they do not know is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


def macros() -> Any:
    """The parts that all pages are made of."""
    return templates().get_template("macros.html").module


class Html(str):
    """Text that is markup already. Everything else is only words."""

    __slots__ = ()


def safe(content: object) -> Html:
    return content if isinstance(content, Html) else Html(html.escape(str(content), quote=True))


def join(parts: Iterable[object], separator: str = "") -> Html:
    return Html(safe(separator).join(safe(part) for part in parts))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """An element; `class_` is written `class`, and `_` in other attributes `-`.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{written}>{join(content)}</{name}>")


def void(name: str, /, **attributes: object) -> Html:
    """An element without content.

    >>> void("img", alt="a 7")
    '<img alt="a 7">'
    """
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))


def bullets(lines: Iterable[object], **attributes: object) -> Html:
    return tag("ul", *(tag("li", line) for line in lines), **attributes)


def table(caption: object, headings: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """A table whose first column names the row; wide ones scroll by themselves."""
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col") for heading in headings)))
    return tag("div", tag("table", tag("caption", caption), head, tag("tbody", *map(_row, rows))), class_="scroll")


def _row(cells: Iterable[object]) -> Html:
    first, *rest = cells
    return tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest))


def folded(title: object, *content: object, **attributes: object) -> Html:
    return tag("details", tag("summary", title), *content, **attributes)


PALETTE = {
    "page": ("#fdfdfc", "#16181c"),
    "card": ("#f5f5f2", "#1f2228"),
    "ink": ("#1d2126", "#e6e7e9"),
    "muted": ("#636b74", "#9aa3ad"),
    "line": ("#dcdcd6", "#373c44"),
    "published": ("#3f78b0", "#76aee3"),
    "adaptive": ("#22262c", "#eceef0"),
    "clean": ("#8b929a", "#868e97"),
    "claimed": ("#b5711a", "#e0a24c"),
    "proved": ("#2a7d45", "#62bd7e"),
    "void": ("#8a6a00", "#d8b53a"),
    "refuted": ("#b83232", "#ee7b78"),
    "consistent": ("#2e7c94", "#6fbdd4"),
    "attack-1": ("#4f86ba", "#7fb2e5"),
    "attack-2": ("#7b62ad", "#ab95dd"),
    "attack-3": ("#2f8f8f", "#5fc2c0"),
    "attack-4": ("#9c6b52", "#cf9d83"),
    "attack-5": ("#b3598f", "#e08fc0"),
    "attack-6": ("#73808d", "#a5b1bd"),
    "attack-7": ("#6c7a24", "#b2c063"),
    "attack-8": ("#35507a", "#8fa6d6"),
}
"""Light and dark value of each colour. The light ones differ, so a figure's colours can be told apart by value."""

LIGHT = {name: light for name, (light, _) in PALETTE.items()}


def _variables(which: int) -> str:
    return "".join(f"--{name}:{colours[which]};" for name, colours in PALETTE.items())


CSS = (
    f":root{{color-scheme:light dark;{_variables(0)}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
 font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:.1rem 0 .3rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.8rem 0 .5rem;padding-top:.9rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.6rem 0 .3rem}
p{margin:.4rem 0;max-width:50rem}
code{font:.9em ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
a{color:var(--published)}
small,.muted,figcaption,caption{color:var(--muted)}
.eyebrow{color:var(--muted);font-size:.8rem;letter-spacing:.06em;text-transform:uppercase;margin:0}
.lead{font-size:1.15rem;line-height:1.5;margin:1.2rem 0;max-width:none}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem;margin:1.2rem 0}
.tile{background:var(--card);border-radius:8px;padding:.8rem 1rem;border-top:3px solid var(--clean)}
.tile.published{border-color:var(--published)}.tile.adaptive{border-color:var(--adaptive)}
.tile.gap{border-color:var(--refuted)}.tile.proved{border-color:var(--proved)}
.tile b{display:block;font-size:1.75rem;line-height:1.25;font-weight:650}
.tile span{display:block;font-size:.85rem}
.tile small{display:block;font-size:.8rem}
.card{background:var(--card);border-left:5px solid var(--muted);border-radius:0 8px 8px 0;padding:.9rem 1.2rem;
 margin:1rem 0;break-inside:avoid}
.card>:first-child{margin-top:0}.card ul{margin:.3rem 0;padding-left:1.2rem}
.card h3{margin:.2rem 0}.card p.status{font-size:1.2rem;font-weight:650}
.card.claimed,.card.warning{border-color:var(--claimed)}.card.claimed .status,.card.warning h3{color:var(--claimed)}
.card.void{border-color:var(--void)}.card.void .status{color:var(--void)}
.card.proved,.card.well{border-color:var(--proved)}.card.proved .status{color:var(--proved)}
.card.refuted,.card.none,.card.error{border-color:var(--refuted)}
.card.refuted .status,.card.none .status,.card.error h3{color:var(--refuted)}
.chip{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 .55em;font-size:.78rem;
 white-space:nowrap}
.chip.claimed{color:var(--claimed);border-style:dashed}.chip.void{color:var(--void);border-style:dashed}
.chip.proved{color:var(--proved)}
.chip.consistent{color:var(--consistent)}
.chip.not-tested{color:var(--muted);border-style:dashed}
.chip.refuted,.chip.none{color:var(--refuted);border-style:dotted}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:.6rem 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.8rem 0 1.4rem}
table{border-collapse:collapse;font-size:.87rem;width:100%}
caption{text-align:left;padding-bottom:.4rem;max-width:50rem;font-size:.87rem}
th,td{padding:.32rem .8rem .32rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
thead th{font-weight:600;color:var(--muted);vertical-align:bottom}
tbody th{font-weight:500}
td small{display:block;white-space:nowrap}td b{white-space:nowrap}
td code,tbody th code{white-space:nowrap}
tbody th{min-width:4rem}
figure{margin:1rem 0;break-inside:avoid}
figcaption{font-size:.87rem;max-width:50rem}
.chart{overflow-x:auto}
.chart svg{display:block;width:100%;height:auto;min-width:34rem}
.chart svg text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif!important}
.examples{display:grid;grid-template-columns:repeat(auto-fill,minmax(29rem,1fr));gap:1rem 2rem;margin:1rem 0}
.example{display:grid;grid-template-columns:repeat(auto-fill,minmax(5.6rem,1fr));gap:.6rem;break-inside:avoid}
.example div{text-align:center;font-size:.82rem;line-height:1.35}
.example img{display:block;width:100%;image-rendering:pixelated;border:1px solid var(--line);margin-bottom:.2rem}
.right{color:var(--proved)}.wrong{color:var(--refuted)}
details{margin:1rem 0}summary{cursor:pointer;font-weight:600}
details.run{border-top:1px solid var(--line);padding-top:.8rem}
details.run>summary{font-size:1.1rem;overflow-wrap:anywhere}
footer{margin-top:3rem;color:var(--muted);font-size:.8rem}
@media(max-width:40rem){.examples{grid-template-columns:1fr}dl{grid-template-columns:1fr}dt{margin-top:.4rem}}
@media print{body{font-size:10.5pt}main{max-width:none;padding:0}tr{break-inside:avoid}h2,h3{break-after:avoid}
 .scroll,.chart{overflow:visible}.chart svg{min-width:0}details::details-content{content-visibility:visible}
 .tile,.card,.chip,td,img{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
@page{margin:15mm}
"""
)
