"""Pages for the tests of the page: made once, read as a browser's parser would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import fake

import gpucalc
from gpucalc.plan.answer import Assumption, Level
from gpucalc.report.html.page import Beside, page

# One of each kind: what is drawn differs with the task, the verdict, pipeline stages and kinds of card.
JOBS: dict[str, dict[str, Any]] = {
    "fits": {"job": "llama-3-8b"},
    "pipeline": {"job": "gpt3-175b-full"},
    "too-large": {"job": "models/llama-3-8b", "gpus": "1xRTX4090"},
    "mixed": {"job": "models/llama-3-8b", "gpus": "4xA100+4xRTX3090"},
    "searched": {"job": "llama-3-70b", "run": dict.fromkeys(("tp", "pp", "micro_batch"), "auto")},
    "images": {"job": "models/resnet-50", "gpus": "4xA100"},
    "serving": {"job": "serve-gpt-oss-20b"},
    "serving-experts": {"job": "serve-deepseek-v4-flash"},
}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</style><svg onload=alert(3)>",
    "a&b \x1b[31m\u202egnp.exe",
    "x" * 100_000,
)


@cache
def answer(name: str) -> gpucalc.Plan:
    return gpucalc.plan(**JOBS[name])


@cache
def html(name: str) -> str:
    return answer(name).html()


@cache
def hostile() -> str:
    """A page whose every text from outside tries to be markup."""
    script, image, style, escape, long = HOSTILE
    made = replace(
        fake.plan(Level.FITS),
        name=script + long,
        fleet=image,
        notes=HOSTILE,
        assumptions=tuple(Assumption(f"run.{text}", text, text) for text in HOSTILE),
        memory=replace(fake.plan().memory, note=style, source=image),
        binds=escape,
    )
    return page(made, Beside(provenance={"job": image, "revisions": {script: style}}))


@dataclass
class Read(HTMLParser):
    """A page taken apart."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    rows: list[tuple[str, str, float | str | None]] = field(default_factory=list)  # section, name, value
    styles: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._section = ""
        self._open: list[str] = []
        self._name = ""
        self._value: float | str | None = None
        self._skip = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "section":
            self._section = given.get("id") or ""
        if tag == "tr":
            self._name, self._value, self._open = "", None, []
        if tag in ("th", "td"):
            self._open = [tag]
        if tag == "div" and (self._skip or given.get("class") == "how"):
            self._skip += 1
        if tag == "data" and not self._skip and self._open == ["td"] and self._value is None:
            text = given.get("value") or ""
            self._value = float(text)
        if tag == "a" and self._open == ["th"] and "cite" in (given.get("class") or ""):
            self._open.append("a")
        if tag == "style":
            self._open = ["style"]

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._skip:
            self._skip -= 1
        if tag == "a" and self._open[-1:] == ["a"]:
            self._open.pop()
        if tag in ("tbody", "style"):
            self._open = []

    def handle_data(self, data: str) -> None:
        if self._open == ["style"]:
            self.styles += data
        if self._open == ["th"] and not self._skip:
            self._name += data
        if self._open == ["td"] and self._value is not None and self._name:
            self.rows.append((self._section, self._name.strip(), self._value))
            self._name = ""


def read(text: str) -> Read:
    found = Read()
    found.feed(text)
    found.close()
    return found
