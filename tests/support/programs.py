"""The programs that people start, by name, each with the module that holds its ``act``."""

from tests.support.pages import ROOT

COMMANDS = {path.stem: f"seqpar.cli.{path.stem}" for path in (ROOT / "seqpar" / "cli").glob("*.py")}
del COMMANDS["__init__"]
LABORATORY = {name: name for name in ("bench", "figures")}  # not installed: launch/ is on the path of tests
PROGRAMS = {**COMMANDS, **LABORATORY}
