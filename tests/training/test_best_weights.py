"""What is said once the best weights of a run are gone, or its metrics.jsonl is."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli import evaluate, export, predict, report
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.data.files import write_json
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_status import warn_of_weights, weights_taken
from seqpar.runs.trained_run import read_run
from seqpar.tasks.segment import validation
from seqpar.training import after_step
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import latest_step
from seqpar.weights.pretrained import weights_file
from seqpar.weights.weight_files import digest
from tests.support.checkpoints import write_window
from tests.support.folders import nnunet
from tests.support.training_runs import Launch, at, trained

STEPS = ["--iterations", "2", "--val-every", "1", "--checkpoint-minutes", "1e-9"]
TAKEN = "Predict takes the weights of step {} ({}), as those of step 2, the best validation (mean Dice 0.300), are "


def scored(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Has the next validations of segmentations reach some scores."""
    left, measure = iter(scores), validation.SegmentationValidation._summary

    def summary(*of: object) -> validation.ValidationResult:
        made, score = measure(*of), next(left)  # type: ignore[arg-type]
        return replace(made, score=score, row={**made.row, "dice": {"tumour": score}})

    monkeypatch.setattr(validation.SegmentationValidation, "_summary", summary)


@pytest.fixture
def best_is_first(flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of six steps and three validations, the first of them the best."""
    with monkeypatch.context() as patched:
        scored(patched, 0.3, 0.1, 0.2)
        trained(1, [*flags, *STEPS, "--epochs", "3"], tmp_path / "run")
    return tmp_path / "run"


def page_of(out: Path, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Returns a run's page, and what report printed as warnings."""
    capfd.readouterr()
    assert run(report.act, [str(out), "--cases", "0"]) == 0
    return (out / "report.html").read_text(), capfd.readouterr().err


def test_after_the_best_weights_are_gone_it_is_said_which_are_taken_and_what_they_reached(
    flags, best_is_first, tmp_path, monkeypatch, capfd
) -> None:
    out, lost = best_is_first, best_is_first / "checkpoints" / "step-00000002"
    images = nnunet(tmp_path / "Dataset003_New", 1) / "imagesTr"
    line = [str(out), "-i", str(images), "-o", str(tmp_path / "found"), "--device", "cpu"]
    text, warned = page_of(out, capfd)
    assert "predict uses the weights of step 2" in text and "Predict takes" not in text + warned
    assert run(predict.act, line) == 0 and "warning" not in capfd.readouterr().err

    kept = (lost / "model.safetensors").read_bytes()
    (lost / "model.safetensors").write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    told = TAKEN.format(6, "mean Dice 0.200") + f"damaged: to take them, restore {lost} and use it as "
    text, warned = page_of(out, capfd)
    assert told in text and f"warning: {out}: {told}--checkpoint." in warned, "damaged"
    assert "After step 6, a validation, whose weights predict uses." in text and "predict uses (step 2)" not in text
    write_window(out, {"sliding": 0.3}, 2, temperatures={"sliding": 1.5})
    assert read_run(out).temperatures == {}, "it was fitted to the weights that are gone"
    write_window(out, {"sliding": 0.3}, 6, temperatures={"sliding": 1.5})
    assert read_run(out).temperatures == {"sliding": 1.5}
    shutil.rmtree(lost)
    told = (
        TAKEN.format(6, "mean Dice 0.200")
        + "not there: they were removed, or never saved. If you have a copy, restore "
    )
    text, warned = page_of(out, capfd)
    assert told in text and told in warned, "removed"
    assert run(predict.act, line) == 0 and f"warning: {out}: {told}{lost}." in capfd.readouterr().err
    assert "has not been validated" not in text
    assert run(predict.act, [*line, "--checkpoint", "latest"]) == 0 and told not in capfd.readouterr().err

    scored(monkeypatch, 0.15)
    said = trained(1, ["--resume", "--epochs", "4"], out).said()
    assert "the checkpoint of step 2, the best, is gone: the next validation is the best" in said
    taken = weights_taken(out)
    assert (
        taken.step == 8 and taken.best == 2 and f"{TAKEN.format(8, 'mean Dice 0.150')}not there" in taken.not_the_best
    )
    assert TAKEN.format(8, "mean Dice 0.150") in page_of(out, capfd)[0]


def test_a_best_that_is_newer_than_all_checkpoints_can_be_trained_again(best_is_first) -> None:
    out, newest = best_is_first, best_is_first / "checkpoints" / "step-00000006"
    rows = (out / "metrics.jsonl").read_text().replace('"dice": {"tumour": 0.2}', '"dice": {"tumour": 0.4}')
    (out / "metrics.jsonl").write_text(rows)
    shutil.rmtree(newest)
    assert "If you have a copy, restore" in weights_taken(out).not_the_best, "a run that has ended is not resumed"
    write_json(out / "status.json", {"state": "preempted", "step": 5})
    assert weights_taken(out).not_the_best == (
        "Predict takes the weights of step 2 (mean Dice 0.300), as those of step 6, the best validation (mean Dice "
        "0.400), are not there. Training continues from step 5 with --resume and validates again; if you have a copy, "
        f"restore {newest} instead."
    )


def test_a_run_that_ends_without_its_best_weights_says_so(best_is_first) -> None:
    shutil.rmtree(best_is_first / "checkpoints" / "step-00000002")
    write_json(best_is_first / "status.json", {"state": "preempted", "step": 6})
    said = trained(1, ["--resume"], best_is_first).said()
    assert "finished: the best weights are gone; those after step 6 are here" in said and not re.search(r" -1\b", said)


def test_a_resume_with_fewer_steps_than_were_done_is_refused_and_changes_nothing(best_is_first) -> None:
    assert latest_step(best_is_first / "checkpoints") == 6
    before = {path: path.read_bytes() for path in best_is_first.rglob("*") if path.is_file()}
    told = f"--epochs 1 means 2 steps, and {best_is_first} has done 6 already: give --epochs 3 or more to resume it"
    for more in ([], ["--dry-run"]):
        assert told in trained(1, ["--resume", "--epochs", "1", *more], best_is_first, expect=2).said()
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("name", ["best", "step-00000002/manifest.json", "step-00000002/progress.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(best_is_first, name: str) -> None:
    path = best_is_first / "checkpoints" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is no file .but a pipe"):
        checkpoint.look_up(best_is_first / "checkpoints", "best")


def test_at_a_tie_losses_of_two_kinds_are_not_compared(flags, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    begin, other = [*flags, *STEPS, "--epochs", "1"], ["--resume", "--epochs", "2", "--loss", "ce"]
    for line in (begin, other, ["--resume", "--epochs", "3"]):
        with monkeypatch.context() as patched:
            scored(patched, 0.3)
            said = trained(1, line, out).said()
        assert "as good as" not in said and "finished: best mean Dice 0.300 at step 2" in said


def test_a_checkpoint_under_another_ones_name_is_not_taken_for_it(best_is_first) -> None:
    folder = best_is_first / "checkpoints"
    shutil.rmtree(folder / "step-00000002")
    shutil.copytree(folder / "step-00000006", folder / "step-00000002")
    newest, problems = checkpoint.look_up(folder, "best")
    assert newest.name == "step-00000006" and problems == ["step-00000002 holds the checkpoint of step 6"]
    taken = weights_taken(best_is_first)
    assert (taken.step, taken.best, taken.is_there) == (6, 2, False)
    point = folder / "step-00000002"
    for name, change in (("progress.json", {"step": 2.7}), (checkpoint.MANIFEST, {})):
        content = {**json.loads((point / name).read_text()), **change}
        write_json(point / name, content | ({} if change else {"progress.json": digest(point / "progress.json")}))
    assert checkpoint._problem(point).startswith("step-00000002/progress.json is damaged")


def test_weights_that_rotted_without_a_new_time_are_not_called_those_that_predict_takes(best_is_first, capfd) -> None:
    best, file = weights_taken(best_is_first), best_is_first / "checkpoints" / "step-00000002" / "model.safetensors"
    content, at = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    checkpoint._digest_of.cache_clear()  # of another program's start
    taken = weights_taken(best_is_first)
    assert (best.step, taken.step, taken.best, taken.is_there) == (2, 6, 2, False)
    assert "step-00000002 and use it as --checkpoint" in page_of(best_is_first, capfd)[0].replace("\n", " ")


def test_a_checkpoint_that_cannot_be_read_is_an_error_and_nothing_is_trained_again_in_its_place(
    best_is_first, monkeypatch
) -> None:
    folder, of = best_is_first / "checkpoints", checkpoint.digest

    def refusing(path: Path) -> str:
        if path.parent.name == "step-00000006":
            raise PermissionError(13, "Permission denied")
        return of(path)

    monkeypatch.setattr(checkpoint, "digest", refusing)
    with pytest.raises(DataError, match=r"step-00000006: cannot be read \(Permission denied\)"):
        checkpoint.look_up(folder)
    assert checkpoint.look_up(folder, "best")[0].name == "step-00000002"
    checkpoint._digest_of.cache_clear()
    newest, problems = checkpoint.look_up(folder, "latest", trusts_times=True)
    assert newest.name < "step-00000006" and "cannot be read (Permission denied)" in problems[0]
    assert not checkpoint.is_whole(folder, 6)


def test_a_best_of_another_run_and_edited_data_are_told_wherever_weights_are(best_is_first, tmp_path, capfd) -> None:
    path = best_is_first / "checkpoints" / "step-00000002" / "config.json"
    own = json.loads(path.read_text())
    config = json.loads((best_is_first / "config.json").read_text())
    assert not weights_taken(best_is_first).edited
    edited = {**config, "dataset": {**config["dataset"], "train": [], "values": [0, 2]}}
    write_json(best_is_first / "config.json", edited)
    told = (
        f"{best_is_first}/config.json differs from that of the last checkpoint: values of its data, train of its data."
    )
    assert told in page_of(best_is_first, capfd)[0]
    warn_of_weights(best_is_first)
    assert f"warning: {told}" in capfd.readouterr().err
    write_json(best_is_first / "config.json", config)
    write_json(path, {**own, "history": [{**own["history"][0], "time": "2020-01-01 00:00:00"}]})
    manifest = json.loads((path.parent / checkpoint.MANIFEST).read_text())
    if path.name in manifest:
        write_json(path.parent / checkpoint.MANIFEST, {**manifest, path.name: digest(path)})
    foreign = f"{path.parent}: belongs to another run than config.json describes"
    page = page_of(best_is_first, capfd)[0]
    assert foreign in page and "whose weights predict uses" not in page
    assert foreign in trained(1, ["--resume", "--epochs", "4"], best_is_first, expect=3).said()
    shutil.rmtree(best_is_first / "checkpoints" / "step-00000006")
    (best_is_first / "checkpoints" / "latest").write_text("step-00000002")
    (best_is_first / "model.safetensors").unlink()
    with pytest.raises(DataError, match="belongs to another run"):
        weights_file(str(best_is_first))


def test_what_nothing_tells_of_the_weights_is_said(best_is_first, capfd) -> None:
    out = best_is_first
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    rows = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").unlink()
    told = "weights of step 6 (validated, but its score is not recorded), as those of step 2, the best validation ("
    assert told in weights_taken(out).not_the_best
    (out / "metrics.jsonl").write_text(rows)
    shutil.rmtree(out / "checkpoints")
    (out / "status.json").unlink()
    write_json(out / "status.json", {"state": "preempted", "step": 7})  # of a later start
    assert weights_taken(out).is_untold
    (out / "status.json").unlink()
    told = f"no status.json tells after which step the weights in {out}/model.safetensors were saved, or whether"
    assert told in weights_taken(out).not_the_best
    text, warned = page_of(out, capfd)
    assert told in text and told in warned and "predict uses the weights of step" not in text


def test_of_equally_good_validations_the_one_with_the_lower_loss_is_missed(best_is_first) -> None:
    out, equal = best_is_first, '"dice": {"tumour": 0.3}'
    rows = (out / "metrics.jsonl").read_text().replace('"dice": {"tumour": 0.2}', equal)
    for losses, is_told in (((0.5, 0.4), True), ((0.4, 0.5), False)):
        found = iter((losses[0], 9.0, losses[1]))  # of steps 2, 4 and 6; the weights are those of step 2
        lines = [
            json.dumps(json.loads(line) | ({"loss": next(found)} if '"val"' in line else {}))
            for line in rows.splitlines()
        ]
        (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        told = weights_taken(out).not_the_best
        assert ("Those of step 6 scored better (mean Dice 0.300 with a lower loss), but" in told) == is_told


def test_weights_that_were_not_validated_say_so_and_a_whole_checkpoint_has_only_lost_its_name(
    flags, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "run"
    scored(monkeypatch, 0.3)
    more = ["--iterations", "3", "--val-every", "1", "--checkpoint-minutes", "1e-9", "--epochs", "2"]
    stop = at(after_step.AfterStep, "decide", 0, (out / "stop").touch, call=4)
    trained(1, [*flags, *more], out, expect=75, hook=stop)
    newest = checkpoint.look_up(out / "checkpoints")[0]
    assert newest.name > "step-00000003"
    (out / "checkpoints" / "best").unlink()
    told = weights_taken(out).not_the_best
    step = int(newest.name.removeprefix("step-"))
    assert told.startswith(f"Predict takes the weights of step {step} (not validated). Those of step 3 scored better (")
    assert f"but checkpoints/best does not name them: to take them, use --checkpoint {out}/checkpoints/step-0" in told


def test_a_best_that_names_no_checkpoint_is_said_to(best_is_first, tmp_path, monkeypatch, capfd) -> None:
    out, link = best_is_first, best_is_first / "checkpoints" / "best"
    images = nnunet(tmp_path / "Dataset003_New", 1) / "imagesTr"
    link.write_text("")
    taken = (
        "Predict takes the weights of step 6 (mean Dice 0.200). Those of step 2 scored better (mean Dice 0.300), but "
        "checkpoints/best does not name them: to take them, use --checkpoint "
    )
    assert taken in page_of(out, capfd)[0]
    line = [str(out), "-i", str(images), "-o", str(tmp_path / "found"), "--device", "cpu"]
    for act, arguments in ((predict.act, line), (export.act, [str(out), str(tmp_path / "found.zip")])):
        assert run(act, arguments) == 0
        said = capfd.readouterr().err
        assert f"warning: {link} names no checkpoint: going back to step-00000006" in said and taken in said
    scored(monkeypatch, 0.1)
    assert "going back" not in trained(1, ["--resume", "--epochs", "4"], out).said()
    assert link.read_text() == "step-00000002"


def test_weights_of_validations_that_could_not_be_saved_were_not_chosen(flags, tmp_path, monkeypatch, capfd) -> None:
    out = tmp_path / "run"
    commit, names = checkpoint._commit, list[str]()

    def once(draft: Path, target: Path, *of: object) -> None:
        names.append(target.name)
        if len(names) > 1:
            raise OSError(28, "No space left on device")
        commit(draft, target, *of)  # type: ignore[arg-type]

    scored(monkeypatch, 0.2, 0.3, 0.4)
    monkeypatch.setattr(checkpoint, "_commit", once)
    trained(1, [*flags, *STEPS, "--epochs", "3"], out, expect=1)
    taken = weights_taken(out)
    assert taken.step == 1 and taken.not_the_best == (
        "Predict takes the weights of step 1 (not validated), as those of step 6, the best validation (mean Dice "
        "0.400), are not saved. Training continues from step 1 with --resume."
    )
    text, _ = page_of(out, capfd)
    assert "were chosen on these" not in text and taken.not_the_best in text
    data, images = Path(flags[flags.index("--data") + 1]), tmp_path / "found"
    assert run(predict.act, [str(out), "-i", str(data / "imagesTr"), "-o", str(images), "--device", "cpu"]) == 0
    said = capfd.readouterr().err
    assert f"warning: {out}: {taken.not_the_best}" in said and "has not been validated" not in said
    assert run(evaluate.act, [str(data / "labelsTr"), str(images)]) == 0
    assert "helped to choose" not in "".join(capfd.readouterr())


def test_a_lost_metrics_file_is_contradicted_by_what_else_tells_of_validations(
    flags, best_is_first, monkeypatch, capfd
) -> None:
    out, path = best_is_first, best_is_first / "metrics.jsonl"
    assert weights_taken(out).describe_lost([row for row in read_metrics(path) if row["kind"] == "train"]) == ""
    whole, lines = path.read_text(), path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    lacks = f"{path} lacks steps 4 to 6 and the validation after step 6, which other files of the run record: it was"
    text, warned = page_of(out, capfd)
    assert lacks in text and f"warning: {path} lacks the validation after step 6, which other files" in warned

    path.unlink()
    gone = f"{path} is missing, and with it the record of "
    text, warned = page_of(out, capfd)
    assert f"{gone}steps 1 to 6 and the validations after steps 2 and 6. Restore it" in text
    assert f"warning: {gone}the validations after steps 2 and 6. Restore it from a copy." in warned
    assert "has not been validated" not in text and "The weights that predict uses were chosen on these" in text
    assert weights_taken(out).step == 2 and "weights of step 2" in text, "its checkpoint knows that it is the best"
    data = Path(flags[flags.index("--data") + 1])
    assert run(evaluate.act, [str(data / "labelsTr"), str(out), "--common"]) == 0
    assert f"{gone}the validations after steps 2 and 6." in "".join(capfd.readouterr())

    path.write_text("".join(line for line in lines if '"val"' not in line))
    assert f"{path} lacks the validations after steps 2 and 6, which" in page_of(out, capfd)[0]
    path.unlink()
    scored(monkeypatch, 0.15)
    copied = shutil.copytree(out, out.parent / "copied", ignore=shutil.ignore_patterns("checkpoints", "window.json"))
    (copied / path.name).write_text("".join(line for line in lines if '"val"' not in line))
    text = page_of(copied, capfd)[0]
    assert "lacks the validation after step 6, which" in text and "has not been validated" not in text, "by its folder"
    said = trained(1, ["--resume", "--epochs", "4"], out).said()
    assert (
        f"warning: {path} lacks steps 1 to 6 and the validation after step 6: there was no room for them, or " in said
    )
    assert [row["step"] for row in read_metrics(path) if row["kind"] == "train"] == [6, 7]
    assert f"{path} lacks steps 1 to 6 and the validation after step 2, which" in page_of(out, capfd)[0]
    path.write_text(whole + path.read_text())
    scored(monkeypatch, 0.1)
    assert "lacks" not in trained(1, ["--resume", "--epochs", "5"], out).said(), "restored"


def test_validations_of_other_cases_choose_the_best_anew_and_keep_the_one_before(
    flags, tmp_path, monkeypatch, capfd
) -> None:
    out, more = tmp_path / "run", [*flags, *STEPS, "--patience", "2"]

    def continued(*line: str, of: tuple[float, ...]) -> str:
        with monkeypatch.context() as patched:
            scored(patched, *of)
            return trained(1, line, out).said()

    continued(*more, "--epochs", "2", of=(0.6, 0.2))
    said = continued("--resume", "--epochs", "3", of=(0.3,))
    assert "from here on" not in said and "finished: best mean Dice 0.600 at step 2" in said

    said = continued("--resume", "--fold", "1", "--epochs", "5", of=(0.1, 0.15, 0.12))  # the first of step 6, once more
    assert (
        "from here on validations are of other cases, or of cases labelled or prepared otherwise: the best weights are "
        "chosen anew among them, and --patience counts from the first of them. The best weights until now, those of "
        f"step 2 (mean Dice 0.600), stay in {out}/checkpoints/step-00000002"
    ) in said
    assert "finished: best mean Dice 0.150 at step 8" in said and "ended" not in said
    taken = weights_taken(out)
    assert (taken.step, taken.best, taken.not_the_best) == (8, None, "")
    assert checkpoint.is_whole(out / "checkpoints", 2), "what was the best of the other cases is kept"
    text, _ = page_of(out, capfd)
    assert "The first 3 validations of this run were measured on other cases, on cases labelled or" in text
    assert "the weights of step 8, whose mean Dice was 0.150" in text

    said = continued("--resume", "--val-overlap", "0.25", "--epochs", "9", of=(0.05, 0.04, 0.03, 0.2))
    assert "from here on validations are measured in another way" in said
    assert "finished: best mean Dice 0.050 at step 10; ended at step 14 of 18" in said
    assert all(checkpoint.is_whole(out / "checkpoints", step) for step in (2, 8, 10))


def test_until_the_first_validation_of_other_cases_the_best_before_is_the_one_to_predict_with(
    flags, best_is_first, monkeypatch
) -> None:
    out, lesser = best_is_first, best_is_first / "checkpoints" / "step-00000006"
    stop = at(after_step.AfterStep, "decide", 0, (out / "stop").touch)
    with monkeypatch.context() as patched:
        patched.setattr(validation.SegmentationValidation, "run", lambda *of: None)  # left in it
        said = trained(1, ["--resume", "--fold", "1", "--epochs", "9"], out, expect=75, hook=stop).said()
    assert "from here on validations are of other cases" in said and lesser.is_dir()
    taken = weights_taken(out)
    assert (taken.step, taken.not_the_best, taken.describe_lost()) == (2, "", "")
    progress = checkpoint.read_progress(checkpoint.look_up(out / "checkpoints")[0])
    assert (progress.best, progress.best_step, progress.validated) == (0.3, 2, 6), "as if nobody had tried"
    scored(monkeypatch, 0.1)
    said = trained(1, ["--resume", "--epochs", "3"], out).said()
    assert "resumed at step 6 of 6: no step is left; to train on, give a larger --epochs" in said
    assert "finished: best mean Dice 0.100 at step 6" in said and weights_taken(out).step == 6


def test_weights_of_a_run_without_checkpoints_are_refused_if_they_are_damaged_or_of_another_run(
    flags, best_is_first, tmp_path, capfd
) -> None:
    images = nnunet(tmp_path / "Dataset003_New", 1) / "imagesTr"
    other = tmp_path / "other" / "model.safetensors"
    trained(1, [*flags, *STEPS, "--epochs", "1", "--seed", "7"], other.parent)
    whole = best_is_first / "model.safetensors"
    middle = len(whole.read_bytes()) // 2
    damaged = whole.read_bytes()[:middle] + bytes(40) + whole.read_bytes()[middle + 40 :]
    for number, held in enumerate((whole.read_bytes(), damaged, other.read_bytes())):
        copied = tmp_path / f"copied{number}"
        shutil.copytree(best_is_first, copied, ignore=shutil.ignore_patterns("checkpoints"))
        (copied / whole.name).write_bytes(held)
        codes = [
            run(predict.act, [str(copied), "-i", str(images), "-o", str(copied) + "-found", "--device", "cpu"]),
            run(export.act, [str(copied), str(copied) + ".zip"]),
        ]
        assert codes == [3 * bool(number)] * 2
        with Launch(
            1, [*flags, *STEPS, "--epochs", "1", "--weights", str(copied)], tmp_path / f"next{number}"
        ) as next_run:
            assert next_run.wait() == codes[:1]
        told = (
            f"{copied / whole.name}: is damaged, or the file of another run: status.json next to it has another digest"
        )
        assert [told in said for said in (capfd.readouterr().err, next_run.said())] == [bool(number)] * 2
    step = best_is_first / "checkpoints" / "step-00000002"
    (step / whole.name).write_bytes(other.read_bytes())
    line = [str(best_is_first), "-i", str(images), "-o", str(tmp_path / "found"), "--checkpoint", str(step)]
    assert (
        run(predict.act, [*line, "--device", "cpu"]) == 3 and "manifest.json next to it has" in capfd.readouterr().err
    )
