"""The page about a run: what every run shows, and how a task adds its scores and cases."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from seqpar.data.errors import DataError
from seqpar.data.files import SUFFIXES, read_whole, strip_suffix
from seqpar.data.formats.splits import data_faults
from seqpar.data.phantom.phantom_files import describe_layout, is_generated
from seqpar.models.build import family_of
from seqpar.report.cautions import above_scores, changed_on_the_way, may_be_chance
from seqpar.report.curves import WORDS_OF_LOSSES, WORDS_OF_WINDOWS, seen_in, training_diagrams
from seqpar.report.images import scored_twice
from seqpar.report.plots import draw_charts, name_of_run
from seqpar.report.record import (
    DAMAGE,
    RunRecord,
    count_present,
    is_of_phantoms,
    lacking,
    mixed_line,
    predicted_otherwise,
    read_record,
    runs_behind,
    weights_behind,
)
from seqpar.report.rendering import render
from seqpar.runs.metrics_tail import ERRORS, what_is_not_found, what_was_learned
from seqpar.runs.run_folder import kind_of_validated, leaves_unvalidated, run_of_validation, untaught_classes
from seqpar.scores.label_files import list_label_files
from seqpar.scores.postprocessing import describe_min_component
from seqpar.text import clock, list_modalities, quantity
from seqpar.weights.facts import VALIDATED
from seqpar.weights.weight_files import digest

STATES = {
    "finished": "Finished",
    "running": "Running",
    "preempted": "Left early",
    "failed": "Failed",
    "killed": "Killed",
}
BECAME = "What was removed became background, also within other classes."
TIMES = re.compile(r" x (?=\d)|(?<=\d)x(?=\d)")  # as the terminal writes sizes, which pages write with ×
T = TypeVar("T")


@dataclass(frozen=True)
class FinishedPage:
    """A page.

    - ``what``: what it shows, in words that end with a comma
    - ``faults``: of the two folders that were named
    - ``notes``: lines to print
    """

    text: str
    what: str = ""
    faults: Sequence[str] = ()
    notes: Sequence[str] = ()


def render_run(
    folder: Path,
    record: RunRecord,
    gaps: Sequence[str],
    faults: Sequence[str] = (),
    cautions: Sequence[str] = (),
    loss: str = "",
    classes: Sequence[str] = (),
    truth: Path | None = None,
    prediction: Path | None = None,
    images: Path | None = None,
    subject: str = "",
    unused: str = "",
    unlisted: Sequence[str] = (),
    **parts: Any,
) -> str:
    """Returns the page about a run.

    - ``folder``: of the task, whose page.html extends run.html
    - ``gaps``, ``faults``: what is not here, and what could not be scored
    - ``cautions``: what a reader of the scores should know first
    - ``loss``: its name; "" for the one that ``--loss`` names
    - ``classes``: in the order of their colours
    - ``truth``, ``prediction``: the folders whose scores are shown; None: the run's own validation
    - ``images``: the folder of the images of their cases, if it was named
    - ``subject``: what a prediction without a truth is of; "": of several cases, in its folder
    - ``unused``: which step the scores are of, if predict uses the weights of another
    - ``unlisted``: the cases that the prediction's record does not name
    - ``parts``: what else the task's page.html shows
    """
    name, other, alone = record.path.resolve().name, truth or prediction, prediction is not None and truth is None
    kind = "" if name.lower().startswith("run") else "run "  # its own name may be that of a class
    heading, averaged = f"{kind.capitalize()}{name}", averaged_runs(prediction) if prediction else ""
    another = other_run(prediction, record.path) if prediction else ""
    if prediction:
        by = f"the mean of {averaged}" if averaged else another or f"{kind}{name}"
        by = f"{'in part ' * bool(unlisted)}by {by}"
        heading = f"{'Predictions in' if alone else 'Scores of'} folder {prediction.resolve().name}, {by}"
        if subject:
            heading = f"{subject}, {'of unknown origin' if subject in unlisted else f'predicted {by}'}"
        if others := [case for case in predicted_otherwise(prediction) if subject in ("", case)]:
            heading += " and with other settings" * (not subject)
            mixed = mixed_line(prediction, others).removeprefix("warning: ")
            cautions = [f"{mixed.partition(': scores over')[0] if alone else mixed}.", *cautions]
    if averaged and prediction:
        belongs = any(is_made_by(own, record.path) or Path(own["run"]).name == name for own in made_by(prediction))
        apart = "" if belongs else f", without {name}"  # a member that has moved may have no digest
        unscored = f"{apart}{'; no score of this mean exists' * alone}"
        about = f"Configuration and training are those of {name} alone."
        cautions = [f"The prediction is the mean of {averaged}{unscored}. {about}", *cautions]
    if another:
        about = f"Configuration, training and curves on this page are those of {name}. Cases count as "
        about += f"seen if {another} had seen them."
        cautions = [f"This prediction was made by {another}, not by {name}. {about}", *cautions]
    if prediction and not made_by(prediction) and prediction.resolve().parent != record.path.resolve():
        about = f"The folder {prediction.name} does not say which network made its predictions"
        cautions = [f"{about}: whoever asked for this page says that it was {kind}{name}.", *cautions]
    generated = record.has_phantoms
    if prediction:
        generated = is_generated(images or truth or "unknown") or is_of_phantoms(prediction)
    try:
        main, every = main_settings(record), all_settings(record)
    except DAMAGE as error:
        raise lacking(record.path, error) from None
    what = "volumes and scores" if alone else "errors" if record.network_settings.task in ERRORS else "scores"
    own, told = record.config.get("loss", "dice-ce"), [weak_start(record), what_is_unlearned(record, truth is not None)]
    told = list(filter(None, [data_faults(record.dataset), *told])) + changed_on_the_way(record)
    told += scored_twice(record) if prediction is None and truth is None else []
    if averaged or another:
        told = [f"Of {name} alone: {sentence[0].lower()}{sentence[1:]}" for sentence in told]
    if prediction and (averaged or another):
        told += _unlearned_by_others(record, prediction, truth is not None)
    return render(
        "page.html",
        folder,
        title=f"{averaged or name} · {other.resolve().name if other else record.dataset['name']}",
        name=heading,
        alone=alone,
        what=what,
        scored=_scored(truth, prediction, record, unlisted) if prediction else "",
        generated=above_scores(generated, record.has_phantoms, what),
        shows_phantoms=generated,
        unused=unused,
        run=verdict(record),
        gaps=[*record.gaps, *gaps],
        faults=faults,
        cautions=[*cautions, *told],
        main_settings=main,
        all_settings=every,
        training=draw_charts(
            training_diagrams(
                record.train,
                record.held_out,
                f"Loss ({loss or WORDS_OF_LOSSES.get(own, own)})",
                classes,
                record.dataset,
            )
        ),
        **parts,
    )


def averaged_runs(prediction: Path) -> str:
    """Returns the names of the runs whose mean a folder was predicted with; "" of one run, or if it does not say."""
    names = [name_of_run(Path(made["run"]), "") for made in made_by(prediction)]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else ""


def other_run(prediction: Path, run: Path) -> str:
    """Returns the name of the only run that predicted a folder, "" if it is ``run``, which may have moved since."""
    made, *others = made_by(prediction) or [{"run": str(run)}]
    return "" if others or is_made_by(made, run) else name_of_run(Path(made["run"]), "")


def is_made_by(made: Mapping[str, Any], run: Path) -> bool:
    """Returns whether one of those that predicted a folder, as ``made_by`` says, is ``run``, which may have moved."""
    there, weights = Path(made["run"]), made.get("weights")
    if there.resolve() == run.resolve():
        return True
    for path, known in weights.items() if isinstance(weights, dict) else ():
        if Path(path).is_relative_to(there) and (file := run / Path(path).relative_to(there)).is_file():
            return digest(file) == known
    return False


def is_validation(prediction: Path | None, record: RunRecord) -> bool:
    """Returns whether predictions are a run's own validation, whose cases are those of its data."""
    run = record.path if prediction is None else run_of_validation(Path(os.path.realpath(prediction)))
    return prediction is None or run is not None and os.path.samefile(run, record.path)


def how_predicted(prediction: Path | None, record: RunRecord) -> str:
    """Returns how networks saw the scored cases, a sentence; "" if it is not known.

    - ``prediction``: a folder of label maps; None: the run's own validation
    """
    large = ""
    if is_validation(prediction, record):
        config, place = record.config, prediction or record.path / "validation"
        is_whole = config.get("val_window") == "whole" or place.name == "validation-whole"
        with suppress(OSError, *DAMAGE):  # scores of earlier versions do not tell
            is_whole = json.loads(read_whole(place / "summary.json"))["window"] == "whole"
        mirror = str(config.get("val_mirror", "none")).replace("none", "")
        ways = [{"window": "whole" if is_whole else "sliding", "overlap": config.get("val_overlap"), "mirror": mirror}]
    else:
        ways = [made.get("settings", {}) for made in made_by(prediction)] if prediction else []
        large = " That can ruin the result of cases much larger than the tiles of the training; predict warns of these."
    known = sorted({seen_in(own.get("window"), own.get("overlap"), len(own.get("mirror") or ())) for own in ways})
    if not known or not all(known):
        return ""
    told = f"Each case was predicted {known[0]}" + "; another overlap changes scores a little" * ("overlap" in known[0])
    if len(known) > 1:
        told = f"The averaged networks saw each case in different ways: {'; '.join(known)}"
    return f"{told}.{large * any(WORDS_OF_WINDOWS['whole'] in way for way in known)}"


def not_yet_predicted(prediction: Path) -> list[str]:
    """Returns a sentence if a prediction was left early: it has fewer label maps than its record lists."""
    try:
        named = [str(name) for name in json.loads(read_whole(prediction / "prediction.json"))["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    maps, there = [name for name in named if "/" not in name and name.endswith(SUFFIXES)], list_label_files(prediction)
    if not (gone := [name for name in maps if strip_suffix(name) not in there]):
        return []
    listed = f"{len(gone)} of {quantity(len(maps), 'label map')} of this prediction are not there, such as {gone[0]}"
    why = "it was left early, their images could not be predicted, or they were removed"
    again = "another --output" if predicted_otherwise(prediction) else "--continue"
    return [f"{listed}: {why}. Run predict with {again} to try them again."]


def made_by(prediction: Path) -> list[dict[str, Any]]:
    """Returns what a folder of predictions records of each run behind it; [] if it does not say."""
    try:
        content = json.loads(read_whole(prediction / "prediction.json"))
        return [{**made, "run": str(made["run"])} for made in content.get("runs", [content])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _scored(truth: Path | None, prediction: Path, record: RunRecord, unlisted: Sequence[str] = ()) -> str:
    text = f"Predictions in folder {prediction}, without a truth to score them against."
    if truth:
        which = f"the run's own validation, in folder {prediction}, against {truth}"
        of_others = f"the predictions in folder {prediction} against {truth}, not of the run's own validation"
        text = f"Scores of {which if is_validation(prediction, record) else of_others}."
    weights = weights_behind(prediction)
    heats = {made.get("settings", {}).get("temperature", 1) for made in made_by(prediction)} - {1}
    heat = " and ".join(f"{own:.3g}" for own in sorted(heats))
    text += f" Probabilities were computed at a temperature of {heat}." * bool(heats)
    others = unlisted or predicted_otherwise(prediction)
    by = f"Predicted with {weights}{', but for those named below' * bool(others)}."
    return " ".join([text, *[by] * bool(weights), *_cleaned(prediction, record)])


def _cleaned(prediction: Path, record: RunRecord) -> list[str]:
    """Returns a sentence on what predict removed from its label maps, and on what is there now, if it did."""
    told = dict[str, str]()
    overlaps = any(len(labels) > 1 for labels in record.learned_regions.values())
    for made in made_by(prediction):
        own = made.get("settings", {})
        if least := describe_min_component(str(own.get("min_component", "0"))):
            told[f"regions below {least}"] = "The labels of other regions in its place remain." if overlaps else BECAME
        if own.get("postprocessing"):
            told["all but the largest region of some labels"] = BECAME
    places = dict.fromkeys(told.values())
    each = f"Predict removed {' and '.join(told)}: a class that it had found may be missing here."
    return [" ".join([each, *places])] * bool(told)


def what_is_unlearned(record: RunRecord, has_scores: bool = False) -> str:
    """Returns a sentence if nothing shows that the network has learned to find a class, to classify, or to rebuild.

    - ``has_scores``: whether the page has scores of other cases, which show that themselves of a classifier
    """
    if little := what_was_learned(record.held_out, bool(record.config.get("normalised_targets")))[1]:
        return little
    chance = "" if has_scores else may_be_chance(record)
    if chance or not what_is_not_found(record.held_out):
        return chance
    present = count_present(record.path, record.held_out)
    kind, untaught = kind_of_validated(record.dataset), untaught_classes(record.dataset)
    return what_is_not_found(record.held_out, present, kind, untaught)


def _unlearned_by_others(record: RunRecord, prediction: Path, has_scores: bool = False) -> list[str]:
    """Returns a sentence on each other run behind a prediction if nothing shows that it has learned; for
    ``has_scores`` see ``what_is_unlearned``.
    """
    told = list[str]()
    for made, (run, why) in zip(made_by(prediction), runs_behind(prediction)):
        if why or is_made_by(made, record.path):
            continue
        with suppress(DataError, ValueError, OSError):  # the run's record may be damaged
            if own := what_is_unlearned(read_record(run), has_scores):
                told.append(f"Of {name_of_run(run, '')} alone: {own[0].lower()}{own[1:]}")
    return told


def weak_start(record: RunRecord) -> str:
    """Returns a sentence if a run's weights came from a pretraining that learned little or nothing; else ""."""
    weights = Path(str(record.config.get("weights") or ""))
    folder = next((place for place in (weights, *weights.parents[:3]) if (place / "metrics.jsonl").is_file()), None)
    if not record.config.get("weights") or folder is None:
        return ""
    try:
        start = read_record(folder)
    except DataError:
        return ""
    if start.network_settings.task != "pretrain":
        return ""
    caution = what_was_learned(start.held_out, bool(start.config.get("normalised_targets")))[1]
    if not caution:
        return ""
    learned = f"{caution.removesuffix(' Train longer.')} So this run says little about pretraining."
    return f"The run began with the weights of a pretraining, {folder}. {learned}"


def try_reading(read: Callable[[], T], gaps: list[str]) -> T | None:
    """Returns the scores of single cases; if there are none, None, and adds why to the gaps."""
    try:
        return read()
    except DataError as error:
        gaps.append(f"There are no scores of the cases: {error}.")
        return None


def is_neurological(chosen: bool | None, record: RunRecord) -> bool:
    """Returns whether the patient's left is shown on the left: as ``chosen``, else as in the run's pictures."""
    return bool(record.config.get("neurological") if chosen is None else chosen)


@dataclass(frozen=True)
class Verdict:
    """How far a run came, when, and why it ended."""

    state: str
    words: str
    progress: str
    why: str


def verdict(record: RunRecord) -> Verdict:
    """Returns how a run ended by its status.json, else by its journal."""
    state = str(record.status.get("state", "unknown"))
    step = record.status.get("step", -1)
    if not isinstance(step, int) or step < 0:
        step = max((row.get("step", -1) for row in record.train), default=-1) + 1
    total = int(record.config["epochs"]) * int(record.config["iterations"])
    text = f"step {step:,} of {total:,}"
    if isinstance(when := record.status.get("time"), (int, float)):
        text += time.strftime(", %Y-%m-%d %H:%M", time.localtime(when))
    return Verdict(state, STATES.get(state, "Verdict unknown"), text, str(record.status.get("why") or ""))


def main_settings(record: RunRecord) -> dict[str, str]:
    """Returns the settings that most readers look for."""
    config, data, layout = record.config, record.dataset, record.layout
    settings, tile = record.network_settings, " × ".join(map(str, config["tile"]))
    kind = family_of(settings)
    last = f" in the last of {quantity(text.count(',') + 1, 'lesson')}" if (text := config.get("curriculum")) else ""
    train, validated = {*data["train"]}, {*data.get(VALIDATED, data["held_out"])}
    both, apart = len(validated & train), {*data["held_out"]} - train  # --fold all holds none out
    some = f" ({part} of them validated)" if (part := leaves_unvalidated(record.content)) else ""
    told = [f"{both} of them validated as well"] * bool(both)
    told += [f"{len(apart)} held out{some}"] * bool(apart or not both)
    cases = ", ".join([f"{quantity(len(train), 'case')} to train on", *told])
    pipe = f"pipe {layout['pipe']} × " if layout.get("pipe") else ""
    main = {
        "data": f"{data['name']} ({describe_layout(str(data['layout']), record.has_phantoms)}): {cases}",
        "modalities": list_modalities(data["modalities"]),
        "tile": TIMES.sub(" × ", f"{tile} voxels{last}, {kind.describe_tile(settings)}"),
        "network": TIMES.sub(" × ", kind.describe(settings)),
        "parameters": parameters(layout),
        "training": f"{quantity(config['epochs'], 'epoch')} × {quantity(config['iterations'], 'step')}, "
        f"{config['optimizer']}, learning rate {config['lr']}, {config['precision']}",
        "ranks": f"{layout['ranks']} = data {layout['data']} × {pipe}seq {layout['seqpar']}, mode {config['mode']}",
        "hardware": hardware(layout),
        "training time": training_time(record),
    }
    if stages := layout.get("placement", ()):
        main["stages"] = str(stages[0])
    return {name: format_setting(value) for name, value in main.items()}


def all_settings(record: RunRecord) -> dict[str, str]:
    """Returns every setting, with versions and the commands."""
    versions = record.content.get("versions", {})
    every = {"preset": record.content.get("preset"), "commit": record.content.get("commit")}
    every |= {f"version of {name}": version for name, version in versions.items()}  # seqpar is a setting too
    every |= {**commands_of(record), **record.config}
    return {str(name): format_setting(value) for name, value in every.items()}


def commands_of(record: RunRecord) -> dict[str, str]:
    """Returns the command that began a run, and those that resumed it, each with the step from which it did."""
    history = record.content.get("history") or [{"command": record.content.get("command", ())}]  # of an older run
    first, *others = (" ".join(map(str, start.get("command", ()))) for start in history)
    resumed = [f"{line} (from step {start.get('step', 0):,})" for line, start in zip(others, history[1:])]
    return {"command": first} | ({"resumed with": "; ".join(resumed)} if resumed else {})


def parameters(layout: Mapping[str, Any]) -> str:
    """Returns the numbers of parameters in words, "" where the run did not record them."""
    counts = layout.get("parameters", {})
    parts = " + ".join(f"{name} {count / 1e6:.2f} M" for name, count in counts.items())
    total = f"{sum(counts.values()) / 1e6:.2f} M"
    return f"{total}: {parts}" if len(counts) > 1 else total * bool(counts)


def hardware(layout: Mapping[str, Any]) -> str:
    """Returns the devices of the ranks and the number of nodes in words, "" where the run did not record them."""
    devices, nodes = Counter(layout.get("devices", ())), len(set(layout.get("hosts", ())))
    names = ", ".join(f"{count} × {name}" for name, count in devices.items())
    return f"{names} on {quantity(nodes, 'node')}" if names else ""


def training_time(record: RunRecord) -> str:
    """Returns how long all steps and validations took, "" where the journal does not say."""
    steps, validations = (
        [row["seconds"] for row in rows if isinstance(row.get("seconds"), (int, float))]
        for rows in (record.train, record.held_out)
    )
    if not steps:
        return ""
    times = f"{quantity(len(steps), 'step', ',')} {clock(sum(steps))} (median {median(steps):.3g} s)"
    if validations:
        times += f", {quantity(len(validations), 'validation')} {clock(sum(validations))}"
    return f"{clock(sum(steps) + sum(validations))}: {times}"


def format_setting(value: Any) -> str:
    """Returns the value of a setting as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return "–" if value is None or not text else text
