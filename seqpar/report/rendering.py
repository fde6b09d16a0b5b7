"""Fills the templates of pages: text from files is escaped, and a value that a template lacks is an error."""

import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import seqpar
from seqpar.text import with_minus

TEMPLATES = Path(__file__).parent / "template"


def render(template: str, /, folder: Path | None = None, **values: Any) -> str:
    """Returns a filled template.

    - ``folder``: where a task has a template of its own, which extends those that are here
    """
    return _environment(folder).get_template(template).render(values)


@cache
def _environment(folder: Path | None) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([folder, TEMPLATES] if folder else [TEMPLATES])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # what a browser's JSON.parse reads
    environment.globals |= {
        "asset": asset,
        "version": seqpar.__version__,
        "now": lambda: time.strftime("%Y-%m-%d %H:%M"),
    }
    environment.filters |= {"nan_to_none": nan_to_none, "short": lambda number: f"{number:.6g}", "minus": with_minus}
    return environment


def asset(name: str) -> Markup:
    """Returns a style sheet or script unchanged."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def nan_to_none(value: Any) -> Any:
    """Returns a value with None for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: nan_to_none(part) for key, part in value.items()}
    return [nan_to_none(part) for part in value] if isinstance(value, (list, tuple)) else value
