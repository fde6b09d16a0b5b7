"""Each link of each page leads to a file and a heading that exist, and the manual's index leads to every page."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.pages import INDEX, PAGES, ROOT, links, without_code

RESULTS = ROOT / "launch" / "lab" / "benches" / "results"  # written by programs


def all_pages() -> list[Path]:
    """Returns every page of the checkout; without git, those that people read."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return sorted(path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()) or PAGES


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#{1,6} (.+?)\s*$", without_code(page.read_text()), re.M)
    names = [re.sub(r"[^\w\- ]", "", plain(heading).lower()).replace(" ", "-") for heading in headings]
    seen, found = Counter[str](), set[str]()
    for name in names:
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def plain(heading: str) -> str:
    """Returns a heading without the marks of links and emphasis."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("*", "")


def broken(page: Path) -> list[str]:
    """Returns the relative links of a page that lead nowhere."""
    found = []
    for target, anchor in links(page):
        if not target.exists():
            found.append(f"{target} does not exist")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            found.append(f"{target} has no #{anchor}")
    return found


def reachable(start: Path) -> set[Path]:
    """Returns the pages to which links lead from a page, itself included."""
    seen, left = set[Path](), [start]
    while left:
        page = left.pop()
        if page not in seen:
            seen.add(page)
            left += [target for target, _ in links(page) if target.suffix == ".md" and target.is_file()]
    return seen


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken(page) == []


def test_the_index_leads_to_every_page() -> None:
    pages = {page for page in all_pages() if RESULTS not in page.parents}
    assert len(pages) > 30
    assert sorted(pages - reachable(INDEX)) == []


def test_the_index_names_every_page_of_the_manual_itself() -> None:
    linked = {target for target, _ in links(INDEX)}
    assert sorted(set((ROOT / "docs").rglob("*.md")) - linked - {INDEX}) == []


def test_pictures_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", without_code(page.read_text())):
            assert "://" in name or (page.parent / name).is_file(), (page, name)


def test_broken_links_and_anchors_are_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two `words`, a dash-ed one\n\n## [Linked](x.md)\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    good = "[a](other.md#two-words-a-dash-ed-one) [b](other.md#linked) [c](other.md#twice-1) [d](#here) [e](https://x.org/y)"
    page.write_text(f"# Here\n\n{good}\n\n```\n[f](in-code.md)\n```\n")
    assert broken(page) == []
    page.write_text("[a](none.md) [b](other.md#twice-2) [c](#nowhere)\n")
    assert len(broken(page)) == 3
    assert reachable(page) == {page, tmp_path / "other.md"}
