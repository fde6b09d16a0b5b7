"""The manual as a site: built strictly, without a link that leads nowhere, and with a search that finds things."""

import functools
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.browser.chromium import Chromium, lacking
from tests.support.pages import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="MkDocs is not installed (pip install -e '.[docs]')"
)
RESULTS = "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"


class Html(HTMLParser):
    """The links and the names of a page's elements."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.names = list[str](), {"", "__codelineno"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.names.add(value)


def broken(site: Path) -> list[str]:
    """Returns the links of a site that lead nowhere."""
    pages = {path: Html(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for page, html in pages.items():
        for link in html.links:
            name, anchor = urldefrag(unquote(link))
            if ":" in name or name.startswith("//"):
                continue
            path = (page.parent / name).resolve() if name else page
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file() or (path in pages and anchor not in pages[path].names):
                found.append(f"{page.relative_to(site)}: {link}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *of: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_no_link_of_the_site_is_broken(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 50
    assert broken(site) == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text('<a href="b.html#here"></a><a href="b.html#gone"></a><img src="c.png">')
    assert broken(tmp_path) == ["a.html: b.html#gone", "a.html: c.png"]


def test_the_api_is_that_of_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    assert "Sets up the mesh" in page and "number of ranks that share a tile" in page
    assert ":::" not in page, "mkdocstrings did not run"
    assert "<code>``" not in page, "names of arguments keep their backticks"


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_search_finds_halo_and_nothing_comes_from_elsewhere(address: str, browser: Chromium) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(f"{address}/index.html")
    browser.wait("document.querySelector('.md-search__input') !== null")
    browser.value(
        "document.querySelector('[for=__search]').click(); document.querySelector('.md-search__input').focus()"
    )
    browser.ask("Input.insertText", text="halo")
    browser.wait(f"{RESULTS}.length > 3")
    assert any("/glossary.html" in link for link in browser.value(RESULTS)), browser.value(RESULTS)
    browser.open(browser.value(RESULTS)[0])
    assert "halo" in browser.value("document.querySelector('article').textContent").lower()
    assert browser.complaints == []
    outside = [url for url in browser.requests if not url.startswith((address, "data:", "about:", "blob:"))]
    assert outside == []
