"""The architecture, held by a machine: imports point down, torch.distributed stays in its rooms."""

import ast
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = {
    "seqpar.environment": 0,
    "seqpar.mesh": 0,
    "seqpar.watch": 0,
    "seqpar.dataless": 0,
    "seqpar.collectives": 1,
    "seqpar.remaps": 1,
    "seqpar.windows": 1,
    "seqpar.layout": 2,
    "seqpar.attention": 2,
    "seqpar.choice": 2,
    "seqpar.exchange": 2,
    "seqpar.gather_x": 2,
    "seqpar.kernels": 2,
    "seqpar.spread": 2,
    "seqpar.losses": 2,
    "seqpar.tokens": 3,
    "seqpar.blocks": 4,
    "seqpar.encoder": 4,
    "seqpar.data": 4,
    "seqpar.metrics": 4,
    "seqpar.surfaces": 4,
    "seqpar.lesions": 4,
    "seqpar.decoders.halved": 5,
    "seqpar.decoders.ops": 5,
    "seqpar.decoders.norms": 5,
    "seqpar.decoders.pieces": 5,
    "seqpar.decoders.pooling": 5,
    "seqpar.decoders.spread": 5,
    "seqpar.decoders": 6,
    "seqpar.launch.streams": 6,
    "seqpar.launch.exits": 7,
    "seqpar.launch.config": 7,
    "seqpar.launch": 8,
}
ACTS = {"train", "predict", "evaluate", "prepare", "phantom", "plan", "bench", "doctor", "report"}
FREE = {"seqpar"}  # hands names on, lazily
OWNERS = {
    "torch.distributed": {"seqpar.mesh", "seqpar.collectives"},
    "torch.nn.parallel": {"seqpar.launch.trainer"},
    "torch.distributed.fsdp": {"seqpar.launch.trainer"},
    "torch.distributed.tensor": {"seqpar.launch.trainer"},
}


def modules() -> dict[str, Path]:
    found = {}
    rooms = {"seqpar": "seqpar", "decoders": "seqpar.decoders", "launch": "seqpar.launch"}
    for folder, prefix in ((ROOT / top, name) for top, name in rooms.items()):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if folder.name == "seqpar" and inside.parts[0] in ("decoders", "launch"):
                continue  # the links
            name = ".".join([prefix, *inside.with_suffix("").parts]).removesuffix(".__init__")
            found[name] = path
    return found


def floor(name: str) -> int:
    act = name.removeprefix("seqpar.launch.")
    if act in ACTS:
        return 9
    while name not in FLOORS:
        name = name.rpartition(".")[0]
        assert name, "a module that stands on no floor"
    return FLOORS[name]


def imports(path: Path, known: Collection[str] = ()) -> set[str]:
    """Returns what a file imports; of a package's names, those ``known`` as modules stand for themselves."""
    found, known = set[str](), set(known)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are spelled in full"
            spelled = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= spelled & known | ({node.module or ""} if spelled - known else set())
    return found


def test_imports_point_down() -> None:
    names = modules()
    assert len(names) > 12
    for name, path in names.items():
        if name in FREE:
            continue
        for target in imports(path, names) & names.keys() - FREE:
            same_room = target.rpartition(".")[0] == name.rpartition(".")[0]
            assert floor(target) < floor(name) or (same_room and floor(target) == floor(name)), f"{name} → {target}"


def nearest(used: str) -> str:
    """Returns the longest of the libraries with owners that an import belongs to."""
    return max((library for library in OWNERS if f"{used}.".startswith(f"{library}.")), key=len, default="")


def test_rooms_own_their_libraries() -> None:
    for name, path in modules().items():
        for library, owners in OWNERS.items():
            uses = any(nearest(used) == library for used in imports(path))
            assert not uses or name in owners, f"{name} imports {library}"
    assert any("torch.distributed" in imports(path) for path in modules().values())  # the control


def test_no_started_script_shadows_a_module() -> None:
    taken = set(sys.stdlib_module_names) | {"torch", "numpy", "nibabel", "einops", "batchgenerators", "scipy", "test"}
    assert not taken & {path.stem for path in (ROOT / "launch").glob("*.py")}


def test_the_package_imports_without_work() -> None:
    """Nothing heavy happens at import: torch comes with the first name that needs it."""
    code = "import sys, seqpar; assert 'torch' not in sys.modules; seqpar.SeqParViT; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
