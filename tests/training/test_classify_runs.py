"""Runs that give volumes a class: on any ranks and stages those of one process, resumed, predicted, scored, shown."""

import json
import re
import shutil
import signal
from pathlib import Path

import nibabel
import numpy as np
import pytest

from seqpar.cli import evaluate, export, predict, report
from seqpar.cluster.exit_codes import DATA, USAGE
from seqpar.parallel.launcher import Launcher
from seqpar.prediction.prediction_folder import inputs_of
from seqpar.report.images import other_images
from seqpar.report.record import read_record
from seqpar.runs.journal import read_metrics
from seqpar.tasks.classify.scores import read_class_table, replaced_rows, row_stamps
from seqpar.tasks.classify.validation import ClassValidation
from seqpar.training import gradients, trainer
from seqpar.training.run_request import read_request
from seqpar.weights import checkpoint
from seqpar.weights.weight_files import read_weights
from tests.support.class_folders import class_folder
from tests.support.messages import refused_with
from tests.support.training_runs import Launch, at, die, farthest, losses, trained

TINY = """
    --task classify --preset debug --batch 2 --iterations 3 --epochs 2 --val-every 1 --augment none --device cpu
    --precision fp64 --lr 0.01
"""
RESATTNET = "--network resattnet18 --features 2"
VIT = "--embed-dim 12 --heads 2 --depth 1 --patch 8 --pooling token --positions learned"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("classify")
    return [*TINY.split(), "--data", str(class_folder(root / "data")), "--cache", str(root / "cache")]


@pytest.fixture(scope="module")
def one(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple:
    out, own = tmp_path_factory.mktemp("classify") / "one", [*flags, *RESATTNET.split()]
    return out, own, trained(1, own, out, pictures=True)


@pytest.fixture(scope="module")
def vit(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    out, own = tmp_path_factory.mktemp("classify") / "vit", [*flags, *VIT.split()]
    trained(1, own, out)
    return out, own


def states(out: Path) -> dict:
    return read_weights(out / "model.safetensors")


def val_rows(out: Path) -> list[dict]:
    return [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "val"]


def same(a: Path, b: Path) -> float:
    """Returns the largest difference of two runs' losses and weights, and asserts equal validations."""
    for ours, theirs in zip(val_rows(a), val_rows(b), strict=True):
        assert ours["scores"] == theirs["scores"] and abs(ours["loss"] - theirs["loss"]) < 1e-9
    ours, theirs = states(a), states(b)
    apart = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)
    return max(farthest(losses(a), losses(b)), apart)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_killed_classification_goes_on_to_the_same_numbers(
    flags: list[str], vit: tuple, tmp_path: Path, workers: str
):
    """In a step, in validation, and while its checkpoint is written; with a worker that loads tiles, too."""
    out, line = tmp_path / "run", [*flags, *VIT.split(), "--checkpoint-minutes", "1e-9", "--workers", "1"]
    for owner, name, call in (
        (gradients.Gradients, "_backward", 3),
        (ClassValidation, "run", 1),
        (checkpoint, "_commit", 2),
    ):
        trained(1, line, out, expect=-signal.SIGKILL, hook=at(owner, name, 0, die, call))
        line = ["--resume"]
    trained(1, line, out)
    assert same(out, vit[0]) == 0.0


def test_a_run_ends_with_a_table_of_held_out_classes(one: tuple) -> None:
    out, _, launch = one
    table = read_class_table(out / "validation/predictions.csv")
    assert table.names == ("healthy", "ill") and len(table.cases) == 2
    summary = json.loads((out / "validation/summary.json").read_text())
    assert summary["scores"]["accuracy"] == val_rows(out)[-1]["scores"]["accuracy"]
    said = launch.said()
    assert "class ill: 3 to train on, 1 held out" in said and "outputs: healthy, ill" in said
    assert "tile 40x24x16" in said and "best balanced accuracy" in said
    assert said.count("\nvalidation on 2 ") > said.count("(in brackets: 95 % confidence intervals)\n") == 1
    assert "warning: On 2 held-out cases this run reached a balanced accuracy of" in said, "which guessing could reach"
    assert "dice" not in said.lower() and not (out / "window.json").exists(), "they are of labels of voxels"
    assert min((out / name).stat().st_size for name in ("progress.png", "validation.png")) > 5000


def test_an_archive_says_what_its_run_said_of_guessing(one: tuple, tmp_path: Path, capsys) -> None:
    out, own, _ = one
    for source, archive in ((out, tmp_path / "a.zip"), (tmp_path / "a.zip", tmp_path / "again.zip")):
        assert export.act([str(source), str(archive)]) == 0
        assert "warning: On 2 held-out cases this run reached a balanced" in capsys.readouterr().err
    launch = predicted(1, archive, of(own), tmp_path / "p")
    assert f"warning: {archive}: On 2 held-out cases this run reached a balanced accuracy of" in launch.said()


def test_ranks_that_share_volumes_and_have_others_train_as_one_process(one: tuple, tmp_path: Path) -> None:
    out, own, _ = one
    trained(4, [*own, "--seqpar", "2", "--mode", "halo", "--batch", "1"], tmp_path / "four")
    assert same(tmp_path / "four", out) < 1e-9


@pytest.mark.started
def test_a_vision_transformer_of_two_ranks_or_two_places_is_that_of_one(vit: tuple, tmp_path: Path) -> None:
    (out, own), maps = vit, []
    trained(2, [*own, "--seqpar", "2", "--mode", "swap"], tmp_path / "two")
    assert same(tmp_path / "two", out) < 1e-9
    for world in (1, 2):
        launch = predicted(world, out, of(own), tmp_path / f"p{world}", "--explain")
        assert launch.codes == dict.fromkeys(range(world), 0), launch.said()
        assert "nothing shows that the network has learned. Do not trust its classes" in launch.said()
        maps.append(read_maps(tmp_path / f"p{world}"))
    assert all(np.abs(a - b).max() < 1e-6 for a, b in zip(*maps)) and maps[0][1].max() > 0.99
    with pytest.raises(ValueError, match="--neurological would do nothing: .*explanations has pictures"):
        report.act([str(out), "--truth", of(own), "--prediction", str(tmp_path / "p1"), "--neurological"])
    trained(2, [*own, "--pipe", "2", "--batch", "1", "--accumulate", "2"], tmp_path / "piped")
    assert same(tmp_path / "piped", out) < 1e-9


@pytest.mark.started
def test_weights_in_shards_become_what_whole_ones_become(one: tuple, vit: tuple, tmp_path: Path) -> None:
    for (out, own), more in ((one[:2], "--seqpar 2 --mode halo"), (vit, "--batch 1")):
        trained(2, [*own, *more.split(), "--shard-weights"], tmp_path / out.name)
        assert same(tmp_path / out.name, out) < 1e-9


def test_a_run_goes_on_to_the_same_weights_on_other_ranks(one: tuple, tmp_path: Path) -> None:
    out, own, _ = one

    def leave() -> None:
        raise KeyboardInterrupt

    with Launch(
        1, [*own, "--checkpoint-minutes", "1e-6"], tmp_path / "run", at(trainer.Trainer, "_step", 0, leave, 5)
    ) as cut:
        cut.wait()
    trained(2, ["--resume", "--seqpar", "2", "--mode", "halo", "--device", "cpu"], tmp_path / "run")
    assert same(tmp_path / "run", out) < 1e-9


def test_a_pipe_cuts_the_convolutions(one: tuple, tmp_path: Path) -> None:
    out, own, _ = one
    pipe = ["--pipe", "2", "--placement", "3", "--batch", "1", "--accumulate", "2"]
    trained(1, [*own, "--batch", "1", "--accumulate", "2"], tmp_path / "alone")
    trained(2, [*own, *pipe], tmp_path / "piped")
    assert same(tmp_path / "piped", tmp_path / "alone") < 1e-9


def of(own: list[str]) -> str:
    return own[own.index("--data") + 1]


def predicted(world: int, out: Path, data: str, folder: Path, *more: str) -> Launch:
    line = [str(out), "-i", data, "-o", str(folder), "--device", "cpu", *more]

    def act(arguments: list[str]) -> int:
        return predict.act(arguments[: len(line)])  # without the launch's --out

    with Launch(world, line, folder.with_name(f"{folder.name}-launch"), act=act) as launch:
        launch.wait()
    return launch


def read_maps(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities that predict wrote, and where the classes are seen."""
    table = read_class_table(folder / "predictions.csv")
    images = [nibabel.load(folder / "explanations" / f"{case}.nii.gz") for case in table.cases]
    return table.probabilities, np.stack([image.get_fdata() for image in images])


@pytest.mark.started
def test_predictions_and_where_they_are_seen_do_not_depend_on_the_ranks(one: tuple, tmp_path: Path) -> None:
    out, own, _ = one
    for world, *more in ((1, "--explain"), (2, "--explain-by", "hirescam", "--mode", "halo")):
        launch = predicted(world, out, of(own), tmp_path / f"p{world}", *more)
        assert launch.codes == dict.fromkeys(range(world), 0), launch.said()
    assert f"maps of the evidence, with pictures: {tmp_path / 'p2/explanations'}" in launch.said()
    (probabilities, first), (other, seen) = (read_maps(tmp_path / f"p{world}") for world in (1, 2))
    assert len(probabilities) == 8 and first.min() >= 0 and 0.99 < first.max() <= 1.001
    assert np.abs(other - probabilities).max() < 1e-8
    assert np.abs(seen - first).max() < 1e-6, "in float32 on disk"
    image = nibabel.load(tmp_path / "p1/explanations/c_00.nii.gz")
    source = nibabel.load(Path(of(own), "c_00.nii.gz"))
    assert image.shape == source.shape and np.allclose(image.affine, source.affine)
    assert (tmp_path / "p1/explanations/c_00.png").stat().st_size > 5000


@pytest.mark.parametrize("which", ["one", "vit"])
def test_ranks_that_would_look_at_their_own_part_alone_predict_nothing(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    out, own, *_ = request.getfixturevalue(which)
    launch = predicted(2, out, of(own), tmp_path / "p", "--mode", "nogather", "--seqpar", "2")
    assert launch.codes == {0: USAGE, 1: USAGE}, launch.said()
    assert "--mode nogather: a class is of a whole volume, not of its parts: use gather" in launch.said()
    assert not (tmp_path / "p").exists()


@pytest.mark.started
def test_predictions_go_on_and_are_scored_and_shown(one: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, own, _ = one
    data, folder = of(own), tmp_path / "classes"
    line = [str(out), "-i", data, "-o", str(folder), "--device", "cpu"]
    assert predict.act(line) == 0
    whole = (folder / "predictions.csv").read_text()
    (folder / "predictions.csv").write_text("\n".join(whole.splitlines()[:4]) + "\n")
    assert predict.act([*line, "--continue"]) == 0 and (folder / "predictions.csv").read_text() == whole
    said = capsys.readouterr().out
    assert json.loads((folder / "prediction.json").read_text())["label_maps"] == row_stamps(whole)
    assert replaced_rows(folder) == replaced_rows(folder / "predictions.csv") == ""
    head, first, *others = whole.splitlines()
    name, given, p, q = first.split(",")
    (folder / "predictions.csv").write_text("\n".join([head, f"{name},{given},{q},{p}", *others]) + "\n")
    told = f"1 of 8 rows of {folder / 'predictions.csv'}, such as that of {name}, has changed since it was written."
    assert replaced_rows(folder) == told and row_stamps(whole).keys() == {name, *(row.split(",")[0] for row in others)}
    (folder / "predictions.csv").write_text(whole)
    assert "predicting the classes of 5 cases (" in said and "model.safetensors; 1 rank" in said
    assert f"report.py {out} --prediction {folder} --truth TRUTH  (scores and cases on one page)" in said
    own = Path(shutil.copytree(out, tmp_path / "own"))
    rows = (own / "validation" / "predictions.csv").read_text().splitlines()
    assert replaced_rows(own) == replaced_rows(own / "validation") == ""
    name, given, p, q = rows[1].split(",")
    (own / "validation" / "predictions.csv").write_text("\n".join([rows[0], f"{name},{given},{q},{p}", rows[2]]) + "\n")
    assert f"such as that of {name}, has changed since it was written." in replaced_rows(own)
    shutil.rmtree(own)
    assert evaluate.act([data, str(folder)]) == 0 and evaluate.act([data, str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 cases" in said and "--images FOLDER" not in said
    named = Path(shutil.copytree(data, tmp_path / "namesakes"))  # other patients under the same names
    for path in named.glob("*.nii.gz"):
        image = nibabel.load(path)
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj)[::-1].copy(), image.affine), path)
    assert evaluate.act([data, str(folder)]) == 0
    said = capsys.readouterr().out
    assert "were in the run's training data" in said and "predicted from other files" not in said
    assert evaluate.act([str(named), str(folder), "--json", str(tmp_path / "n.json")]) == 0
    assert "Caution: 8 of 8 scored cases, such as " in (said := capsys.readouterr().out)
    assert f", were predicted from other files than their images in {named}: unless these are the same images" in said
    record, files = read_record(out), inputs_of(folder)
    (one,) = other_images(record, named, files, [name])
    assert one.startswith(
        f"Caution: 1 of 1 scored case, such as {name}, was predicted from another file than its image"
    )
    assert other_images(record, named, files, []) == other_images(record, Path(data), files, [name]) == []
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "labels.csv").write_bytes((Path(data) / "labels.csv").read_bytes())
    assert evaluate.act([str(tmp_path / "truth"), str(folder)]) == 0, "a folder without images is a truth, too"
    capsys.readouterr()
    with pytest.raises(ValueError, match="--images: this run gives each case a class; .*: remove it"):
        report.act([str(out), "--images", data])
    assert report.act([str(out)]) == 0
    page = (out / "report.html").read_text()
    assert 'id="confusion"' in page and "ROC" in page and "calibration curve" in page and page.count("<img") == 2
    assert 'id="viewer"' in page, "of the run's own cases too, which have no labels of voxels"
    assert '<details id="surfaces">' not in page, "nothing to show in 3D"
    assert "All 2 cases, the lowest probability of the true class first." in page
    other = Path(shutil.copytree(out, tmp_path / "copy"))
    assert report.act([str(out), str(other)]) == 0
    page = (out / "comparison.html").read_text()
    assert 'id="class-scores"' in page and 'id="probabilities"' in page and "Balanced accuracy on held-out" in page
    kept = (best := other / "checkpoints/best").read_text()
    earlier = min(path.name for path in best.parent.glob("step-*"))
    best.write_text(earlier)
    assert report.act([str(other)]) == 0 and report.act([str(out), str(other)]) == 0
    best.write_text(kept)
    step = json.loads((out / "validation/summary.json").read_text())["step"]
    unused = f"after step {step}, not with the weights that predict uses (step {int(earlier[-8:])})"
    for heading in ("<h2>Scores ", "<h2>Cases ", "<h3>Confusion matrix ", "<figcaption>ROC curve of ill, "):
        assert f"{heading}{unused}" in (other / "report.html").read_text() and unused not in page
    assert f"copy: scores of its cases are those {unused}." in (out / "comparison.html").read_text()
    assert report.act([str(out), "--truth", data, "--prediction", str(folder), "--out", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").read_text().count("<img") == 6
    (folder / "predictions.csv").write_text("\n".join(whole.splitlines()[:4]) + "\n")
    page = tmp_path / "few.html"
    assert report.act([str(out), "--truth", data, "--prediction", str(folder), "--out", str(page)]) == 0
    line_of_missing = "without a prediction: c_03, c_04"
    assert line_of_missing in capsys.readouterr().out and line_of_missing in page.read_text()
    assert re.search("of 3 scored cases (was|were) in the run.*s training data", page.read_text())
    assert export.act([str(out), str(tmp_path / "run.zip"), "--licence", "CC0-1.0"]) == 0
    assert b"c_01" not in (tmp_path / "run.zip").read_bytes(), "no names of cases"
    assert predict.act([str(tmp_path / "run.zip"), *line[1:4], str(tmp_path / "zip"), *line[5:]]) == 0
    assert (tmp_path / "zip/predictions.csv").read_text() == whole
    content = json.loads((other / "config.json").read_text())
    content["dataset"]["test"] = ["c_01", "c_06"]  # as the split test of a table
    (other / "config.json").write_text(json.dumps(content))
    part = tmp_path / "part"
    assert predict.act([str(other), "-i", data, "-o", str(part), "--test-part", "--device", "cpu"]) == 0
    assert read_class_table(part / "predictions.csv").cases == ("c_01", "c_06")
    assert evaluate.act([data, str(part), "--test-of", str(other)]) == 0
    with pytest.raises(ValueError, match="--overlap would do nothing"):
        predict.act([*line, "--overlap", "0.1"])
    with pytest.raises(
        ValueError, match="--explain-by gradient-x-input: this network has no such way: use --explain-by hire"
    ):
        predict.act([*line, "--explain-by", "gradient-x-input"])


def test_a_run_goes_on_with_the_classes_that_it_began_with(one: tuple, tmp_path: Path) -> None:
    out, own, _ = one
    run, data = shutil.copytree(out, tmp_path / "run"), shutil.copytree(of(own), tmp_path / "data")
    more = ["--resume", "--epochs", "3", "--data", str(data), "--cache", str(tmp_path / "cache"), "--device", "cpu"]
    table, was = data / "labels.csv", (run / "config.json").read_text()
    began = table.read_text()
    table.write_text(began.replace("healthy", "well"))  # which now comes behind ill
    launch = trained(1, more, run, expect=DATA)
    assert f"{data}: has the classes ill, well, but the run in {run} learned healthy, ill" in launch.said()
    assert (run / "config.json").read_text() == was
    lines, held_out = began.splitlines(), json.loads(was)["dataset"]["held_out"]
    parts = ["train" if line.split(",")[0] in held_out else "val" if n < 3 else "train" for n, line in enumerate(lines)]
    table.write_text("\n".join(["case,class,split", *map(",".join, zip(lines[1:], parts[1:]))]))
    launch = trained(1, more, run)
    moved = parts[1:].count("val")
    assert moved and f"warning: this run trained on {moved} case" in launch.said()
    assert val_rows(run)[-1]["cases"] == moved


REFUSED = {
    "--loss dice-ce": "it takes voxels: use ce or focal",
    "--network unet-lamp": "--network unet-lamp with --task classify: choose one of vit, resattnet18",
    "--mode nogather": "a class is of a whole volume",
    "--foreground 0.5": "--foreground would do nothing: --task classify",
    "--fold 7": "the folds are 0 to 4",
    "--preset lamp": "it is made for labels of voxels",
    "--preset auto": "it plans tiles, and volumes that have one class each are taken whole: use resattnet",
    "--pooling token --positions rope": "a class token has no position to rotate it by",
    "--network resattnet18 --features 2 --seqpar 3 --mode halo": "leaves a rank without output",
    "--network resattnet18 --features 2 --seqpar 3 --mode auto --batch 3": "takes for a case alone; or --mode swap",
    "--deep-supervision": "--deep-supervision would do nothing",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_cannot_be_is_refused_at_once(more: str, flags: list[str]) -> None:
    with refused_with(REFUSED[more]):
        read_request([*flags, *more.split()], Launcher("test", world=3 if "seqpar 3" in more else 1))


def test_data_are_needed_and_their_faults_have_their_code(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--task classify needs --data"):
        read_request(["--task", "classify", "--preset", "debug", "--device", "cpu"], Launcher("test"))
    launch = trained(1, [*flags, "--class-weights", "1", "2", "3"], tmp_path / "weights", expect=USAGE)
    assert "2 are needed, for healthy, ill" in launch.said()
    root = class_folder(tmp_path / "data", 4)
    (root / "labels.csv").write_text("case,class\nc_00,a\n")
    launch = trained(
        1, ["--preset", "resattnet", "--data", str(root), "--device", "cpu"], tmp_path / "two", expect=DATA
    )
    assert "has no line for case c_01" in launch.said()


def test_a_dry_run_tells_sizes_from_headers(flags: list[str], tmp_path: Path) -> None:
    more = ["--network", "resattnet18", "--seqpar", "2", "--mode", "halo", "--dry-run"]
    said = trained(1, [*flags, *more], tmp_path / "run").said()
    assert "tells healthy, ill apart" in said and "8 cases, 6 to train on, 2 held out" in said
    assert not (tmp_path / "run").exists()
