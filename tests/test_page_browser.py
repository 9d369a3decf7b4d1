"""The page of a plan in Chromium: it fits every width, logs nothing, asks for nothing, and can be used by
keyboard and screen reader (axe-core's rules).

Needs Chromium (Debian's `chromium`, or $CHROMIUM names one) and the packages of the test extra.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pages
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
QUIET += ("--disable-background-networking", "--disable-component-update")
WIDTHS = (360, 800, 1440)
NAMES = [*pages.JOBS, "hostile"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: the test extra"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {name: pages.hostile() if name == "hostile" else pages.html(name) for name in NAMES}
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    return {name: folder / f"{name}.html" for name in NAMES}


@pytest.fixture
def opened(browser: Browser, files: dict[str, Path]) -> Iterator[Any]:
    """Opens a page; when the test is done, it must have logged nothing and asked for nothing but itself."""
    said: list[str] = []
    contexts = []

    def open_page(name: str, *, width: int = 1440, scheme: str = "light", quiet: bool = True) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        if quiet:
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: said.append(dialog.message))
            page.on("request", lambda request: request.url.startswith("file:") or said.append(request.url))
        page.goto(files[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_the_window(name: str, width: int, opened: Any) -> None:
    page = opened(name, width=width)
    assert overflow(page) <= 0
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true })")
    assert overflow(page) <= 0
    if name == "hostile":
        return
    clipped = page.evaluate(
        """[...document.querySelectorAll('.tiles dd, td.n data, h1, h2:not(.off), .banner')]
           .filter(part => { const box = part.getBoundingClientRect();
                             return box.left < -1 || box.right > innerWidth + 1
                                    || part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 0 })
           .map(part => part.textContent)"""
    )
    assert clipped == []


@pytest.mark.parametrize("width", WIDTHS)
def test_words_of_a_drawing_stay_inside_it(width: int, opened: Any) -> None:
    for name in ("pipeline", "serving", "mixed"):
        page = opened(name, width=width)
        outside = page.evaluate(
            """[...document.querySelectorAll('figure')].flatMap(figure => {
                 const frame = figure.getBoundingClientRect();
                 return [...figure.querySelectorAll('text')].filter(word => {
                   const box = word.getBoundingClientRect();
                   return box.right > frame.right + 1 || box.left < frame.left - 1;
                 }).map(word => word.textContent) })"""
        )
        assert outside == [], name


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("fits", 1440, "light"),
        ("fits", 360, "dark"),
        ("serving", 360, "light"),
        ("too-large", 800, "dark"),
        ("hostile", 800, "light"),
    ],
)
def test_axe_has_no_serious_finding(name: str, width: int, scheme: str, opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="of the test extra").Axe()
    page = opened(name, width=width, scheme=scheme)
    page.evaluate("document.querySelectorAll('section details').forEach((part, n) => { part.open = n < 25 })")
    found = axe.run(page).response["violations"]
    told = [(item["id"], item["impact"], item["nodes"][0]["html"][:200]) for item in found]
    assert [item for item in told if item[1] in ("serious", "critical")] == []


@pytest.mark.parametrize("name", pages.JOBS)
def test_the_numbers_a_browser_reads_are_the_document_s(name: str, opened: Any) -> None:
    document = pages.answer(name).document()
    page = opened(name)
    values = page.evaluate("[...document.querySelectorAll('#memory data, .tiles data')].map(d => +d.value)")
    assert document["verdict"]["needed_bytes"] in values
    assert document["verdict"]["capacity_bytes"] in values
    tiles = page.evaluate("[...document.querySelectorAll('.tiles data')].map(d => +d.value)")
    known = {line["value"] for tree in document["lines"] for line in (tree, *tree.get("children", []))}
    assert set(tiles) <= known | {document["verdict"]["needed_bytes"]}


def test_a_link_opens_what_it_leads_to(opened: Any) -> None:
    page = opened("fits")
    page.click(".tiles a >> nth=1")
    target = page.evaluate("location.hash")
    assert page.locator(target).is_visible()


def test_the_keyboard_reaches_everything(opened: Any) -> None:
    page = opened("fits")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#verdict"
    summary = page.locator("#memory summary").first
    summary.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.locator("#memory .how").first.is_visible()


def test_the_reader_s_setting_decides_light_or_dark(opened: Any) -> None:
    colour = "getComputedStyle(document.querySelector('.gpucalc')).backgroundColor"
    light, dark = (opened("fits", scheme=scheme).evaluate(colour) for scheme in ("light", "dark"))
    assert light != dark


def test_print_has_no_navigation_and_no_overflow(opened: Any) -> None:
    page = opened("fits", width=800)
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert overflow(page) <= 0
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_notebook_s_cell_fits_its_column(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 600, "height": 800})
    cell = pages.answer("fits")._repr_html_()
    page.set_content(f"<!doctype html><title>notebook</title><body>{cell}{cell}</body>")
    assert overflow(page) <= 0
    assert page.locator(".tiles").count() == 2
    page.close()
