"""Hooks of MkDocs: the site's navigation is the manual's index, and links that leave docs lead to pages of the site.

On the site a page of docs keeps its path, and a file elsewhere in the repository has ``repository/`` before it. A
linked folder becomes a page that lists its files.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"""(\]\(|\bsrc=")([^)"\s#]+)((?:#[^)\s]*)?[)"])""")
FENCE = re.compile(r"(^ *```.*?^ *```+ *$)", re.S | re.M)
API = re.compile(r"^(### ([A-Za-z]\w*)\n\n(?:```py\n.*?^```\n\n)?).*?(?=^##|\Z)", re.S | re.M)
ARGUMENTS = re.compile(r"<code>``(.*?)``</code>")


def prose(text: str) -> str:
    """Returns a page's text without its blocks of code."""
    return FENCE.sub("", text)


def targets(page: Path, text: str) -> Iterator[Path]:
    """Yields the files and folders to which a page's links lead."""
    for _, target, _ in LINK.findall(prose(text)):
        if "://" not in target and not target.startswith("mailto:"):
            yield (page.parent / target).resolve()


def uri(path: Path) -> str:
    """Returns the path of a file of the repository below the sources of the site."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    name = f"repository/{path.relative_to(ROOT).as_posix()}"
    return f"{name}/README.md" if path.is_dir() else name


def source(src_uri: str) -> Path:
    """Returns the file or folder whose text is at a path of the site."""
    outside = src_uri.removeprefix("repository/")
    path = DOCS / src_uri if outside == src_uri else ROOT / outside
    return path if path.exists() else path.parent


def listing(folder: Path) -> str:
    """Returns a page that lists a folder's files."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def text_of(path: Path) -> str:
    return listing(path) if path.is_dir() else path.read_text()


def outside(start: list[Path]) -> list[Path]:
    """Returns the files and folders outside docs to which links lead, directly or by way of each other."""
    left, found = list(start), dict[Path, None]()
    while left:
        page = left.pop()
        shown = page.is_dir() or page.suffix == ".md"
        base = page / "README.md" if page.is_dir() else page
        for target in targets(base, text_of(page)) if shown else ():
            if target not in found and target != DOCS and DOCS not in target.parents and target.exists():
                found[target] = None
                left.append(target)
    return list(found)


def on_config(config: Any) -> Any:
    """Makes the navigation from the headings and links of the manual's index."""
    index, nav = DOCS / "README.md", list[Any](["README.md"])
    for section in re.split(r"^## ", index.read_text(), flags=re.M)[1:]:
        pages = [uri(path) for path in targets(index, section) if path.suffix == ".md" and path != index]
        nav.append({section.partition("\n")[0].rstrip(" …"): list(dict.fromkeys(pages))})
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds what is outside docs."""
    for path in outside(sorted(DOCS.rglob("*.md"))):
        if path.suffix == ".md" or path.is_dir():
            files.append(File.generated(config, uri(path), content=text_of(path)))
        else:
            files.append(File.generated(config, uri(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links to the places of the site; the API's text comes from the docstrings themselves.

    Only pages of docs are searched: the log and the tables of results would come before them on every topic.
    """
    src_uri = page.file.src_uri
    if src_uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}
    path = source(src_uri)
    base = path / "README.md" if path.is_dir() else path
    here = os.path.dirname(src_uri)

    def lead(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        place = (base.parent / target).resolve()
        return f"{before}{os.path.relpath(uri(place) if place != DOCS else 'README.md', here)}{after}"

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lead, part) for part in parts[::2]]
    text = "".join(parts)
    if src_uri == "reference/api.md":
        text = API.sub(r"\1::: seqpar.\2\n\n", text)
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Takes the backticks off the names of arguments, which a docstring's section keeps."""
    return ARGUMENTS.sub(lambda found: f"<code>{found[1].replace('``, ``', '</code>, <code>')}</code>", html)
