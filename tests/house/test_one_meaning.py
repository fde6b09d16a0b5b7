"""One name has one meaning: no two public classes of the library share a name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def classes_by_name(sources: dict[str, str]) -> dict[str, list[str]]:
    """Returns the files in which each public top-level class is defined."""
    files = defaultdict[str, list[str]](list)
    for file, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(file)
    return files


def shared(sources: dict[str, str]) -> dict[str, list[str]]:
    return {name: files for name, files in classes_by_name(sources).items() if len(files) > 1}


def test_no_two_classes_share_a_name() -> None:
    files = [path for top in ("seqpar", "decoders") for path in (ROOT / top).rglob("*.py")]
    inside = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    sources = {file: text for file, text in inside.items() if not file.startswith("seqpar/decoders/")}
    assert len(sources) > 200
    assert shared(sources) == {}


def test_two_classes_of_one_name_are_found() -> None:
    one, other = "class Run: ...\nclass _Part: ...", "class Run: ...\nclass Step:\n    class Run: ..."
    assert shared({"a.py": one, "b.py": other, "c.py": "class _Part: ..."}) == {"Run": ["a.py", "b.py"]}
