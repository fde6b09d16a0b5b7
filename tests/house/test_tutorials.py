"""Tutorials: what is run, and which differences of what it prints are seen."""

from pathlib import Path

import pytest

from tests.support.tutorials import BLOCK, GAP, PAGES, differences, follow, near, pictures, steps_of

PAGE = """# Title

Save it as `said.py`:

```python
print("loss 0.50, 3 cases")
print("lines between")
print("in 12 s")
```

```console
$ python said.py
{}
$ echo a \\
    b
a b
```
"""


def follow_page(kept: str, folder: Path) -> tuple[str, list[str]]:
    page = folder / "page.md"
    page.write_text(PAGE.format(kept))
    text, steps = follow(page, folder)
    return text, differences(steps)


@pytest.mark.parametrize("kept", ["loss 0.52, 3 cases\n…\nin 7 s", "loss 0.50, 3 cases\nlines between\nin 12 s", "…"])
def test_what_a_page_shows_may_differ_in_times_and_last_digits(kept: str, tmp_path: Path) -> None:
    text, wrong = follow_page(kept, tmp_path)
    assert wrong == []
    kept = kept.replace("0.52", "0.50").replace("in 7 s", "in 12 s")
    assert text == PAGE.format(kept), "kept again, and shortened as before"


@pytest.mark.parametrize("kept", ["loss 0.80, 3 cases\n…", "loss 0.50, 4 cases\n…", "loss 0.50, 3 cases", "other\n…"])
def test_other_words_counts_and_losses_are_seen(kept: str, tmp_path: Path) -> None:
    _, (wrong,) = follow_page(kept, tmp_path)
    assert wrong.startswith("$ python said.py\nloss 0.50, 3 cases") and wrong.endswith(kept)


def test_a_command_that_fails_ends_the_tutorial(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo why; false\n```\n")
    with pytest.raises(RuntimeError, match="code 1:\nwhy"):
        follow(page, tmp_path)


def test_numbers_near_zero_and_large_ones() -> None:
    assert near("Dice 0.02", "Dice 0.06") and near("1234.0 mm", "1200.0 mm")
    assert not near("Dice 0.02", "Dice 0.2") and not near("1234.0 mm", "1000.0 mm")


def test_pictures_are_kept_under_the_paths_that_they_are_drawn_at() -> None:
    drawn = [picture for page in PAGES for picture in pictures(page).items()]
    assert drawn and all(kept.is_file() for kept, _ in drawn)


def test_every_tutorial_shows_what_its_commands_print() -> None:
    """A page that was never followed has nothing below its commands."""
    assert len(PAGES) == 5
    for page in PAGES:
        steps = [step for *_, console in BLOCK.findall(page.read_text()) for step in steps_of(console)]
        assert sum(any(line != GAP for line in step.kept) for step in steps) >= 3, page
