"""Pages are short, and those for newcomers easy to read: counted without code, tables and lists of links."""

import re
from pathlib import Path

import pytest

from tests.support.pages import INDEX, PAGES, ROOT, without_code

GENERATED = {ROOT / "docs" / "reference" / name for name in ("flags.md", "api.md")}
MOST_LINES = {
    ROOT / "README.md": 150,
    INDEX: 60,
    ROOT / "launch" / "README.md": 80,
    ROOT / "seqpar" / "README.md": 100,
    ROOT / "CONTRIBUTING.md": 80,
}
START = sorted((ROOT / "docs" / "start").glob("*.md"))
MOST_WORDS, LEAST_EASE = 30, 50.0  # of a sentence; Flesch's reading ease, 50 to 60: "fairly difficult"


def sentences(text: str) -> list[str]:
    """Returns the sentences of a page's prose and lists; code counts as one word, links as their words."""
    text = re.sub(r"^(#|\|).*$", "", without_code(text), flags=re.M)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    joined = (" ".join(part.split()).lstrip("-*0123456789. ") for part in paragraphs)
    return [one for part in joined for one in re.split(r"(?<=[.!?])\s+", part) if words(one)]


def words(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'’-]*", sentence)


def syllables(word: str) -> int:
    """Returns about how many syllables a word has: its groups of vowels, without a silent e at its end."""
    bare = re.sub(r"[^a-z]", "", word.lower())
    silent = re.search(r"([^aeiouyl]|[aeiouy]l)e$|[^aeiouydt]ed$|[^aeiouycszxgh]es$", bare)
    return max(1, len(re.findall(r"[aeiouy]+", bare)) - bool(silent))


def reading_ease(text: str) -> float:
    """Returns Flesch's reading ease: the higher, the easier."""
    every = sentences(text)
    found = [word for sentence in every for word in words(sentence)]
    return 206.835 - 1.015 * len(found) / len(every) - 84.6 * sum(map(syllables, found)) / len(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_begins_with_whom_it_is_for(page: Path) -> None:
    text = page.read_text()
    assert page in GENERATED or len(text.splitlines()) <= MOST_LINES.get(page, 200)
    if page.parent != ROOT and page not in MOST_LINES:
        title, first = re.split(r"\n\s*\n", text)[:2]
        assert title.startswith("# ") and "\n" not in title
        assert first[0].isupper() and first.rstrip()[-1] in ".:", "a sentence that says who needs the page"


@pytest.mark.parametrize("page", sorted({*PAGES} - GENERATED), ids=lambda page: str(page.relative_to(ROOT)))
def test_sizes_have_one_sign(page: Path) -> None:
    """A program prints x, and x can be typed: both are code."""
    prose = re.sub(r"`[^`]*`|\*\*tile [^*]*\*\*", "code", without_code(page.read_text()))
    assert re.findall(r"\d(?: x |x)\d", prose) == []


@pytest.mark.parametrize("page", START, ids=lambda page: page.name)
def test_pages_for_newcomers_are_easy_to_read(page: Path) -> None:
    text = page.read_text()
    long = [one for one in sentences(text) if len(words(one)) > MOST_WORDS]
    assert long == []
    assert reading_ease(text) >= LEAST_EASE


def test_hard_prose_is_seen() -> None:
    easy = "The cat sat on the mat. It ate a rat."
    hard = "Notwithstanding considerable computational heterogeneity, synchronisation necessitates communication."
    assert reading_ease(easy) > 100 and reading_ease(hard) < 0
    assert sentences("# Title\n\nSee [this page](x.md): `a b`.\n\n| a | b |\n\n- one\n- two. Three!\n") == [
        "See this page: code.", "one", "two.", "Three!",
    ]  # fmt: skip
    assert [syllables(word) for word in ("tile", "table", "learned", "voxels", "images", "notes")] == [1, 2, 1, 2, 3, 1]
