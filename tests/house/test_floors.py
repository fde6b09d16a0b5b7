"""The architecture, held by a machine: imports point down, no circles, torch.distributed stays in its rooms."""

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.programs import COMMANDS, LABORATORY, PROGRAMS

ROOT = Path(__file__).parents[2]
TOPS = {"seqpar": "seqpar", "decoders": "seqpar.decoders", "launch/lab": "lab"}
# From the ground up. A floor is a line; its rooms may use each other where that makes no circle.
GROUND = """
    text terminal late_import
    parallel
    spatial
    attention
    vit losses pipeline conversion
    data.boxes data.dicom_series data.errors data.files data.geometry data.itk_files data.volumes data.workers
    data.addresses
    data.formats
    data.preparation
    data.sampling data.phantom
    decoders.decoder
    decoders.modes decoders decoders.unets
    optimization
    settings
    cluster
    models
    weights planner
    scores
    runs
    report
    prediction
    tasks.task tasks.training_data tasks.case_validation tasks.case_evaluation tasks.seen_cases
    tasks.segment tasks.classify tasks.pretrain
    tasks
    training
    nnunet_trainer
    sweeps
    cluster.acceptance
    cli
"""
FLOORS = [[f"seqpar.{room}" for room in line.split()] for line in GROUND.strip().splitlines()]
FLOORS.append(["lab.benches", "lab.figures"])
FREE = {"seqpar", "seqpar.data", "seqpar.decoders", "lab"}  # hand names on, or hold nothing
OWNERS = {
    "torch.distributed": {
        "seqpar.parallel.meeting",
        "seqpar.parallel.mesh",
        "seqpar.parallel.rendezvous",
        "seqpar.parallel.messages",
        "seqpar.parallel.collectives",
    },
    "SimpleITK": {"seqpar.data.itk_files"},
    "highdicom": {"seqpar.data.dicom_series"},
    "pydicom": {"seqpar.data.dicom_series"},
    "ray": {
        "seqpar.sweeps.ray_cluster",
        "seqpar.sweeps.ray_engine",
        "seqpar.sweeps.suggested_points",
        "seqpar.sweeps.sweep_request",
        "seqpar.sweeps.trial",
    },
    "torch.nn.parallel": {"seqpar.training.data_parallel"},
    "torch.distributed.fsdp": {"seqpar.training.data_parallel"},
    "torch.distributed.tensor": {"seqpar.training.data_parallel"},
}


def modules() -> dict[str, Path]:
    """Returns every module of ours with its file; the links to other folders are left out."""
    every = {}
    for folder, prefix in ((ROOT / top, name) for top, name in TOPS.items()):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if folder.name == "seqpar" and inside.parts[0] == "decoders":
                continue
            name = ".".join([prefix, *inside.with_suffix("").parts]).removesuffix(".__init__")
            every[name] = path
    return every


def room_of(name: str) -> str:
    """Returns the room that a module is, or lies in."""
    rooms = {room for floor in FLOORS for room in floor}
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    return name


def floor_of(name: str) -> int:
    (floor,) = [number for number, rooms in enumerate(FLOORS) if room_of(name) in rooms]
    return floor


@cache
def import_lines(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Returns a file's imports, among them the calls of ``late``."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) or is_late(node))


def is_late(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "late"


def imports(path: Path, known: Collection[str] = ()) -> set[str]:
    """Returns what a file imports; of a package's names, those ``known`` as modules stand for themselves."""
    every, known = set[str](), set(known)
    for node in import_lines(path):
        if isinstance(node, ast.Import):
            every |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            every |= {ast.literal_eval(node.args[0])}
        else:
            assert node.level == 0, f"{path}: imports are spelled in full"
            spelled = {f"{node.module}.{alias.name}" for alias in node.names}
            every |= spelled & known | ({node.module or ""} if spelled - known else set())
    return every


def arrows(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """Returns for each module which of ours it imports."""
    return {name: imports(path, names) & names.keys() - FREE for name, path in names.items() if name not in FREE}


def upward(arrows: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the imports that do not point down."""
    return [
        f"{name} → {target}"
        for name, targets in arrows.items()
        for target in targets
        if floor_of(target) > floor_of(name)
    ]


def circle(arrows: Mapping[str, Collection[str]]) -> list[str]:
    """Returns names that lead back to the first of them; none if there is no circle."""
    clear = set[str]()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in clear:
            return []
        for target in arrows.get(name, ()):
            if closed := search(target, [*way, name]):
                return closed
        clear.add(name)
        return []

    return next((closed for name in arrows if (closed := search(name, []))), [])


def between_rooms(arrows: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Returns for each room which others it uses."""
    rooms: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        rooms.setdefault(room_of(name), set()).update(room_of(target) for target in targets)
    return {room: used - {room} for room, used in rooms.items()}


def test_every_module_has_a_room_and_every_room_exists() -> None:
    names = modules()
    assert len(names) > 100
    assert not [name for name in names if name not in FREE and not room_of(name)]
    assert not [room for floor in FLOORS for room in floor if room not in names]


def test_imports_point_down() -> None:
    assert upward(arrows(modules())) == []


def test_neither_files_nor_rooms_form_a_circle() -> None:
    every = arrows(modules())
    assert circle(every) == []
    assert circle(between_rooms(every)) == []


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("seqpar.parallel.layout", "seqpar.vit.encoder"),
        ("seqpar.data.formats.brats", "seqpar.data.preparation.prepared_case"),
        ("seqpar.decoders.plain", "seqpar.models.segmentation_network"),
        ("seqpar.weights.weight_files", "seqpar.cli.train"),
    ],
)
def test_an_import_that_is_turned_round_is_refused(name: str, target: str) -> None:
    every = arrows(modules())
    assert {name, target} <= every.keys()
    assert f"{name} → {target}" in upward({**every, name: {*every[name], target}})


def test_a_circle_on_one_floor_is_refused() -> None:
    every = arrows(modules())
    name, target = "seqpar.spatial.box_grid", "seqpar.spatial.convolution"
    turned = {**every, name: {*every[name], target}}
    assert upward(turned) == [] and circle(turned) != []
    rooms = {**every, "seqpar.settings.config": {"seqpar.cluster.exit_codes"}}
    rooms["seqpar.cluster.exit_codes"] = {"seqpar.settings.command_line"}
    assert circle(between_rooms(rooms)) != []


def between_tasks(arrows: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the imports from one task's folder into another's."""

    def folder_of(name: str) -> str:
        parts = name.split(".")
        return parts[2] if parts[:2] == ["seqpar", "tasks"] and len(parts) > 3 else ""

    return [
        f"{name} → {target}"
        for name, targets in arrows.items()
        for target in targets
        if folder_of(name) and folder_of(target) not in ("", folder_of(name))
    ]


def test_no_task_imports_another() -> None:
    every = arrows(modules())
    assert between_tasks(every) == []
    name, target = "seqpar.tasks.classify.prediction", "seqpar.tasks.segment.prediction"
    assert {name, target} <= every.keys()
    wrong = {**every, name: {*every[name], target}}
    assert between_tasks(wrong) == [f"{name} → {target}"], "a control"


def nearest(used: str) -> str:
    """Returns the longest of the libraries with owners that an import belongs to."""
    return max((library for library in OWNERS if f"{used}.".startswith(f"{library}.")), key=len, default="")


def test_rooms_own_their_libraries() -> None:
    names = modules()
    assert {owner for owners in OWNERS.values() for owner in owners} <= names.keys()
    for name, path in names.items():
        for library, owners in OWNERS.items():
            uses = any(nearest(used) == library for used in imports(path))
            assert not uses or name in owners, f"{name} imports {library}"
    assert any("torch.distributed" in imports(path) for path in names.values())  # the control


def test_nothing_in_the_library_imports_the_programs_or_the_laboratory() -> None:
    def outside(name: str, used: set[str]) -> set[str]:
        return {
            one for one in used if name.startswith("seqpar") and one.partition(".")[0] in ("lab", "launch", *LABORATORY)
        }

    names = modules()
    assert not {name: found for name, path in names.items() if (found := outside(name, imports(path)))}
    assert outside("seqpar.vit.encoder", {"lab.benches.series", "torch"}) == {"lab.benches.series"}  # the control


def test_what_is_in_launch_itself_can_be_started() -> None:
    """A program is a few lines that call ``seqpar.cli``; the two of the laboratory are longer."""
    files = {path.stem: path for path in (ROOT / "launch").glob("*.py")}
    assert files.keys() == PROGRAMS.keys()
    for name in COMMANDS:
        assert f"from seqpar.cli.{name} import main\n" in files[name].read_text(), name
        assert files[name].read_text().count("\n") < 12, name
    for path in files.values():
        assert path.read_text().endswith('if __name__ == "__main__":\n    main()\n'), f"{path.name} cannot be started"
    folders = {path.name for path in (ROOT / "launch").iterdir() if path.is_dir()}
    assert not folders & files.keys()


def test_nothing_that_is_started_shadows_a_module() -> None:
    """The folder of a started file comes first on the path: its files and folders may bear no library's name."""
    libraries = {"torch", "numpy", "nibabel", "einops", "batchgenerators", "scipy", "test", "tensorboard", "matplotlib"}
    taken = set(sys.stdlib_module_names) | libraries
    assert not taken & {path.stem for path in (ROOT / "launch").iterdir()}


def test_every_folder_with_code_is_a_package() -> None:
    for top in TOPS:
        folders = {path.parent for path in (ROOT / top).rglob("*.py")}
        assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_file_is_long() -> None:
    """Beyond 450 lines nobody reads a file in one sitting."""
    skipped = {".venv", ".venv-gpu", "build"}
    lines = {path: path.read_text().count("\n") for path in ROOT.rglob("*.py") if not skipped & {*path.parts}}
    assert len(lines) > 300
    assert not {str(path): number for path, number in lines.items() if number > 450}


def test_the_package_imports_without_work() -> None:
    """Nothing heavy happens at import: torch comes with the first name that needs it."""
    code = "import sys, seqpar; assert 'torch' not in sys.modules; seqpar.SeqParViT; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
