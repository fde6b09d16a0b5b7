"""What the tests of a report's viewer do and look at."""

from tests.browser.chromium import Chromium

NAMES = ["case-a", 'case-<b>&"c"']
PLANE = "document.getElementById('plane-2').toDataURL()"
TOLD = "document.getElementById('told-2').textContent"


def press(page: Chromium, key: str, on: str = "plane-2") -> None:
    page.value(f"document.getElementById('{on}').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, key=key)


def middle(page: Chromium, element: str) -> dict[str, float]:
    """Returns where the middle of an element is seen, after scrolling to it."""
    page.value(f"document.getElementById('{element}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = page.value(f"document.getElementById('{element}').getBoundingClientRect().toJSON()")
    return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
