"""The site of the documentation: it builds without a warning, its links lead somewhere, it needs no network, and it shows in a browser."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from conftest import REPOSITORY
from pages import call
from programs import absent, path_of, skip

from protperf.cli import COMMANDS

pytest.importorskip("sphinx")
pytestmark = pytest.mark.slow

STRICT = ("--fresh-env", "--fail-on-warning", "--keep-going", "--quiet")
BROWSERS = ("chromium-headless-shell", "chromium")
PATIENCE = 120_000
"""Milliseconds; the machine may be busy."""
LOOKED_AT = ("index", "tutorial", "favor", "paper", "cloud", "commands", "configuration", "python")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", *STRICT, str(REPOSITORY / "docs"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return out


class Links(HTMLParser):
    """What an HTML page links to, takes in, and can be linked to at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.taken: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.ids |= {named[name] for name in ("id", "name") if named.get(name)}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        if tag == "link" and named.get("rel") not in ("index", "search", "next", "prev", "author"):
            self.taken.append(named["href"])
        self.taken += [named["src"]] if named.get("src") else []


parse = cache(Links)


def pages_of(site: Path) -> list[Path]:
    return sorted(site.glob("*.html"))


def broken(page: Path, link: str) -> bool:
    """Tell whether a link of a page to another place of the site leads nowhere."""
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)) if parts.path else page
    if not target.is_file():
        return True
    return bool(parts.fragment) and unquote(parts.fragment) not in parse(target).ids


def test_make_docs_is_what_is_built_here():
    planned = subprocess.run(["make", "--dry-run", "docs"], cwd=REPOSITORY, capture_output=True, text=True)
    assert f"sphinx {' '.join(STRICT)} docs " in planned.stdout


def test_every_page_is_in_the_site(site: Path):
    written = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert written <= {path.stem for path in pages_of(site)}


@pytest.mark.parametrize("page", ["howto", "explanation", "reference"])
def test_a_list_of_pages_calls_them_what_they_call_themselves(site: Path, page: str):
    """The sidebar does it by itself."""
    listed = re.findall(
        r"^- \[([^]]+)\]\((\w+)\.md\)", (REPOSITORY / "docs" / f"{page}.md").read_text(), re.MULTILINE
    )
    assert len(listed) >= 3
    for name, target in listed:
        (title,) = re.findall(r"<h1>(.*?)<a ", (site / f"{target}.html").read_text())
        assert html.unescape(re.sub(r"<[^>]+>", "", title)).replace("\u2019", "'") == name


def test_the_site_has_the_pages_of_the_root_and_nothing_that_is_only_for_github(site: Path):
    assert "A protein walks through it" in text_of(site / "contributing.html")
    assert "Keep a Changelog" in text_of(site / "changelog.html")
    assert not [page.name for page in pages_of(site) if "complete in the site" in text_of(page)]


def test_links_lead_somewhere(site: Path):
    found = [
        (page.name, link)
        for page in pages_of(site)
        for link in parse(page).links
        if not urlsplit(link).scheme and broken(page, link)
    ]
    assert not found


def test_nothing_is_taken_from_a_network(site: Path):
    taken = {link for page in pages_of(site) for link in parse(page).taken}
    assert len(taken) > 10
    assert not [link for link in taken if urlsplit(link).netloc]
    styles = [
        path
        for path in site.rglob("*.css")
        if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text())
    ]
    assert not styles


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_the_reference_shows_the_help_of_every_command(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "80")
    shown = text_of(site / "commands.html")
    for command in COMMANDS:
        assert f"usage: protperf {command} " in shown
    for words in (["bench", "paper", "curves"], ["embed"], ["train"]):
        assert call([*words, "--help"]) == 0
        printed = capsys.readouterr().out
        assert len(printed) > 500
        assert printed.rstrip() in shown


def test_the_reference_shows_every_key_of_the_configuration(site: Path, capsys: pytest.CaptureFixture[str]):
    shown = text_of(site / "configuration.html")
    group, keys = "", set()
    assert call(["train", "--cfg", "job"]) == 0
    for line in capsys.readouterr().out.splitlines():
        name = line.strip().partition(":")[0]
        if line.startswith("  ") and not line.startswith(("   ", "  -")):
            keys.add(f"{group}.{name}")
        elif not line.startswith(" ") and not line.startswith("-"):
            group = name
            keys |= set() if line.endswith(":") else {name}
    assert {"model.attention", "trainer.max_steps", "data.path", "name"} <= keys
    assert len(keys) > 70
    assert not [key for key in keys if not re.search(rf"^{re.escape(key)}$", shown, re.MULTILINE)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if len(absent(*BROWSERS)) == len(BROWSERS):
        skip(f"a page is looked at in a browser: one of {', '.join(BROWSERS)} must be installed")
    (program, *_) = [path_of(name) for name in BROWSERS if not absent(name)]
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=PATIENCE)
        yield opened
        opened.close()


SEEN = """() => {
    const light = colour => { const [r, g, b] = colour.match(/[0-9.]+/g).map(Number); return (0.299 * r + 0.587 * g + 0.114 * b) / 255 }
    const style = getComputedStyle(document.body)
    const text = getComputedStyle(document.querySelector("article p"))
    return {
        ground: light(style.backgroundColor),
        text: light(text.color),
        overflow: document.documentElement.scrollWidth - window.innerWidth,
        hidden: [...document.images].filter(image => image.naturalWidth < 100 || image.getBoundingClientRect().width < 200).map(image => image.src),
        figures: document.images.length,
    }
}"""
"""What a reader would see; lightness from 0 to 1."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_show_in_a_browser_without_an_error(site: Path, browser: Any, width: int, scheme: str):
    figures = 0
    errors: list[str] = []
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    for name in LOOKED_AT:
        page.goto((site / f"{name}.html").as_uri())
        seen = page.evaluate(SEEN)
        assert not errors, (name, errors)
        assert not seen["hidden"], (name, seen)
        assert seen["overflow"] <= 0, (name, seen)
        assert (
            (seen["ground"] > 0.9 and seen["text"] < 0.4)
            if scheme == "light"
            else (seen["ground"] < 0.2 and seen["text"] > 0.7)
        ), (name, seen)
        figures += seen["figures"]
    context.close()
    assert figures >= 7
