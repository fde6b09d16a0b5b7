"""The task of pretraining without labels."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqpar.runs.metrics_tail import SCORES
from seqpar.tasks.task import Task
from seqpar.terminal import next_command

if TYPE_CHECKING:
    import argparse

    from seqpar.data.formats.dataset import Dataset
    from seqpar.data.preparation.fingerprint import Fingerprint
    from seqpar.losses import Loss
    from seqpar.parallel.mesh import Mesh
    from seqpar.report.record import RunRecord
    from seqpar.report.run_page import FinishedPage
    from seqpar.report.tables import Table
    from seqpar.settings.config import Config
    from seqpar.tasks.pretrain.validation import MaskedValidation
    from seqpar.tasks.training_data import TrainingData


LABELLED = "LABELLED"  # stands for a data set in a command
PARTNERS = {"mae": "modern", "mae-laptop": "laptop", "mae-debug": "debug", "auto": "modern"}  # presets for labels
WITH_ENCODER = ("tile", "patch", "spacing", "seqpar")  # and the settings of the network


def _caution(run: Path) -> str:
    """Returns a sentence if a run learned little or nothing; else ""."""
    from seqpar.runs.journal import read_metrics
    from seqpar.runs.metrics_tail import what_was_learned
    from seqpar.runs.run_folder import read_config

    held_out = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "val"]
    return what_was_learned(held_out, bool(read_config(run)["config"].get("normalised_targets")))[1]


def flags_of_training(out: Path, archive: Path | None = None) -> list[str]:
    """Returns the flags that train on labels from the encoder in a run folder: a preset, and what differs from it.

    - ``archive``: the exported run, for a user who does not have its data
    """
    from seqpar.runs.run_folder import read_config
    from seqpar.settings.config import SETTINGS, Config
    from seqpar.settings.network_settings import NetworkSettings
    from seqpar.settings.presets import PRESETS
    from seqpar.settings.rules import as_typed, setting_applies

    content = read_config(out)
    own, preset = Config.from_dict(content["config"]), content.get("preset", "")
    preset = PARTNERS.get(preset, preset if preset in PRESETS else "modern")
    other = replace(PRESETS[preset](), task="segment")
    names = [f.name for f in fields(NetworkSettings) if {"pretrain", "segment"} <= set(SETTINGS[f.name].tasks)]
    flags = ["--preset", preset, "--weights", str(archive or out)]
    if own.data:
        has_labels = not archive and any(content["dataset"]["labels"].values())
        flags += ["--data", own.data if has_labels else LABELLED]
    for name in (*WITH_ENCODER, "phantoms", *names):
        value = getattr(own, name)
        if value != getattr(other, name) and setting_applies(own, name) and name not in ("dropout", "drop_path"):
            flags += as_typed(name, value).split()
    return flags


class Pretraining(Task):
    """Nothing is labelled: the network rebuilds hidden parts of the images."""

    name = "pretrain"
    score = SCORES[name]
    does = "rebuilds hidden parts of images, and predicts no labels"
    predictions = ""
    train_command = ("pretrain",)
    is_labelled = False

    def read_dataset(self, path: str) -> Dataset:
        """Returns a data set as training reads it; if labels are missing or wrong, its images alone."""
        from seqpar.tasks.pretrain.data import read_images

        return read_images(path)

    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        from seqpar.tasks.pretrain.data import open_image_data

        return open_image_data(config, is_first)

    def read_headers(self, config: Config) -> Fingerprint:
        from seqpar.tasks.pretrain.data import read_image_headers

        return read_image_headers(config)

    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        from seqpar.tasks.pretrain.data import describe_image_data

        return describe_image_data(fingerprint, config)

    def summary(self, data: TrainingData, config: Config) -> str:
        from seqpar.tasks.pretrain.data import summary_of_images

        return summary_of_images(data, config)

    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> MaskedValidation:
        from seqpar.tasks.pretrain.validation import MaskedValidation

        return MaskedValidation(config, mesh, data, loss, refuse_taken_over)

    def use_of(self, archive: Path, run: Path) -> list[str]:
        """Returns the program that takes the archive of a run, and its arguments."""
        return ["train", *flags_of_training(run, archive)]

    def next_step(self, run: Path) -> str:
        line = next_command("train", *flags_of_training(run))
        notes = ["once it has learned more"] * bool(_caution(run))
        notes += [f"{LABELLED}: a data set with labels"] * (LABELLED in line)
        return line + (f"  ({'; '.join(notes)})" if notes else "")

    def next_lines(self, out: Path) -> list[str]:
        """Returns the commands that usually follow, after a warning if little was learned."""
        caution = _caution(out)
        return [
            *([f"warning: {caution}"] if caution else []),
            f"next: {self.next_step(out)}",
            f"next: {next_command('report', out)}  (curves, errors and pictures on one page)",
        ]

    def page(self, options: argparse.Namespace, record: RunRecord) -> FinishedPage:
        """Returns the page about a run without labels: its error on held-out cases, and pictures."""
        from seqpar.report.run_page import FinishedPage, render_run
        from seqpar.runs.metrics_tail import PADDING, what_was_learned
        from seqpar.runs.run_folder import name_validated

        if flags := [f"--{name}" for name in ("truth", "prediction", "images", "positive") if getattr(options, name)]:
            raise ValueError(f"{flags[0]}: {record.path} is a pretraining, which predicts no labels: remove it")
        picture, png, gaps = record.path / "validation.png", "", list[str]()
        try:
            png = base64.b64encode(picture.read_bytes()).decode()
        except OSError as error:
            gaps.append(f"There are no pictures of validated cases: {picture} cannot be read ({error.strerror}).")
        from seqpar.tasks.pretrain.validation import GIVEN

        normalised = bool(record.config.get("normalised_targets"))
        sentence, _ = what_was_learned(record.held_out, normalised)
        last_validation = record.held_out[-1] if record.held_out else {}
        parts: dict[str, Any] = {"errors": _errors(record), "png": png, "sentence": sentence}
        parts["given"] = f" Errors are in standard deviations of each patch. {GIVEN}." * normalised
        parts["validated"], parts["padding"] = name_validated(record.dataset), last_validation.get(PADDING)
        folder = Path(__file__).parent
        return FinishedPage(render_run(folder, record, gaps, (), [], loss="mean squared error", **parts))


def _errors(record: RunRecord) -> Table | None:
    """Returns the errors on held-out cases, validation by validation; None before the first."""
    from seqpar.report.curves import number
    from seqpar.report.tables import Score, Table, TableHead, TableRow
    from seqpar.runs.metrics_tail import PADDING
    from seqpar.runs.run_folder import name_validated

    if not record.held_out:
        return None
    rows = [TableRow(f"{row['step']:,}", [Score(number(row.get("loss")), 4)]) for row in record.held_out]
    heads = [TableHead("After step"), TableHead("Mean squared error of hidden voxels")]
    count = int(record.held_out[-1].get("cases", 0))
    cases = name_validated(record.dataset, count)
    note = f"On one tile of each of {cases}; the same tokens are hidden in every validation."
    if share := record.held_out[-1].get(PADDING):
        percent = f"{100 * share:.0f}" if share >= 0.01 else "less than 1"
        beyond = f" Of the hidden voxels, {percent} % are padding, as tiles reach beyond the scans: validation "
        note += f"{beyond}errors ignore it, and the training loss counts it."
    return Table("metrics", heads, rows, note=note)
