"""Lists of choices: a module that holds imports alone, a line for each choice, which its last word names."""

from types import ModuleType
from typing import Any


def choices_in(module: ModuleType) -> dict[str, Any]:
    """Returns what a list imports by the names of the choices, with dashes as on the command line."""
    return {name.replace("_", "-"): value for name, value in vars(module).items() if not name.startswith("_")}
