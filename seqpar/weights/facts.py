"""What shapes of weights do not tell of their network, and files of weights do: heads, positions and the like."""

import hashlib
import json
import zipfile
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from seqpar.settings.config import Config
from seqpar.settings.rules import setting_applies
from seqpar.text import quantity

# in config.json, of its data: cases that earlier starts or first weights learned, and train lacks; every data set from
# whose labels first weights learned; whether they do not say that
LEARNED, ANCESTORS, IS_UNKNOWN = "learned_before", "weights_learned_from", "weights_learned_unknown"
FILE_DIGESTS = "files"  # there: digests of each case's files, images and labels; earlier versions recorded none
VOXELS = "voxels"  # there: digests of each case's image, as read; a line of earlier versions has none
ORIGIN = "run"  # in status.json and the summary.json of a validation: which run this is
SUBJECTS = "subjects"  # there: the patients of cases that a table names
VALIDATED = "validated"  # there: the cases that validations of any start scored, where these are not those held out now
CASES_UNKNOWN = "caution: they do not say from which cases they have learned; of those, scores say nothing of new cases"
SETTINGS, WEIGHTS = "config.json", "model.safetensors"  # in a run folder, a checkpoint and an exported run
_ENTRY = "seqpar"  # of a file's metadata
_ENCODER = ("network", "heads", "mlp", "positions", "window")
_FACTS = (*_ENCODER, "decoder", "skips", "tile", "patch")


def as_metadata(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metadata of a safetensors file whose network was built with these settings."""
    facts = {name: settings[name] for name in _FACTS if name in settings}
    return {_ENTRY: json.dumps(facts)} if facts else {"format": "pt"}  # one: several are written in any order


def read_facts(path: str | Path) -> dict[str, Any]:
    """Returns the settings that a file of weights records, else those of the run that it is in; {} for others."""
    path = Path(path)
    if not path.is_file():  # to open a pipe may never end
        return {}
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _facts(json.loads(archive.read(SETTINGS))["config"])
        with safe_open(path, "pt") as file:
            recorded = (file.metadata() or {}).get(_ENTRY)
        if recorded or path.name != WEIGHTS:
            return _facts(json.loads(recorded or "{}"))
        return _facts(json.loads(path.with_name(SETTINGS).read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, zipfile.BadZipFile):
        return {}  # a file of somebody else's


def read_dataset(path: str | Path) -> dict[str, Any]:
    """Returns what a run recorded of its data, from any file of its weights; {} for others.

    Labels and classes of a pretraining are left out, since it saw none.
    """
    path = Path(path)
    with suppress(OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # a file of somebody else's
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _learned_from(json.loads(archive.read(SETTINGS)))
        if path.name != WEIGHTS:
            return {}
        own, above, run = path.absolute().parents[:3]  # of a run, or of a checkpoint in it
        for folder in (own, run) if above.name == "checkpoints" else (own,):
            if (folder / SETTINGS).is_file() and "dataset" in (content := json.loads((folder / SETTINGS).read_text())):
                return _learned_from(content)
    return {}


def _learned_from(content: Mapping[str, Any]) -> dict[str, Any]:
    described = dict(content["dataset"])
    if content.get("config", {}).get("task") == "pretrain":
        described |= {"labels": {}, "volume_classes": None}
    return described


def reordered_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for channels, labels and classes that weights have in another order than the data.

    - ``before``, ``now``: what runs record of their data
    """
    lines = []
    for what in ("channels", "labels", "classes"):
        theirs, ours = (_names(described, what) for described in (before, now))
        if any(name in ours and ours.index(name) != n for n, name in enumerate(theirs)):
            lines.append(
                f"caution: their {what} are {', '.join(theirs)}, and here {', '.join(ours)}, so that some begin with "
                "the weights of others"
            )
    return lines


def sets_learned(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns name, recipe, cases and digests of each data set from whose labels weights have learned, or on whose
    cases they were validated.

    - ``described``: what the run that wrote them records of its data
    """
    learned = sorted({*described.get("train", ()), *described.get(LEARNED, ())})
    has_labels = described.get("labels") or described.get("volume_classes")  # not of a pretraining, or somebody else's
    digests = {case: digest for case, digest in described.get("digests", {}).items() if case in learned}
    own = {name: described.get(name) for name in ("name", "recipe")} | {"train": learned, "digests": digests}
    chose = {*described.get(VALIDATED, described.get("held_out", ()))}.difference(learned)
    own |= {VALIDATED: sorted(chose)} if chose else {}
    if voxels := {case: scan for case, scan in described.get(VOXELS, {}).items() if case in chose.union(learned)}:
        own[VOXELS] = voxels
    named = (described.get("volume_classes") or {}).get("subjects", {})
    if subjects := {case: patient for case, patient in named.items() if case in chose.union(learned)}:
        own[SUBJECTS] = subjects
    return [*[own] * bool(has_labels and learned), *described.get(ANCESTORS, ())]


def sets_of_earlier_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the data sets from which first weights had learned, and a run's own of before if it resumes on others,
    with the cases that it validated.

    - ``before``, ``now``: what it recorded of its data, and records now
    """
    ancestors = list(before.get(ANCESTORS, ()))
    facts = ("name", "recipe", "train", "digests")
    known = [{name: one.get(name) for name in facts} for one in ancestors]
    own = [one for one in sets_learned({**before, ANCESTORS: ()}) if not _is_of(one, now)]
    own = [one for one in own if {name: one[name] for name in facts} not in known]
    held = {*before.get(VALIDATED, before.get("held_out", ()))}.difference(*(one["train"] for one in own))
    scans = {case: digests for case, digests in before.get(VOXELS, {}).items() if case in held}
    own = [{**one, VALIDATED: sorted(held), VOXELS: {**one.get(VOXELS, {}), **scans}} for one in own]
    return [*own, *ancestors]


def _is_of(learned: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether a data set that was learned is a run's own, each case with the voxels that it had."""
    recipes = json.loads(json.dumps([learned["recipe"], now.get("recipe")]))  # lists, not tuples
    digests = now.get("digests", {})
    same = (digests.get(case) == digest for case, digest in learned["digests"].items())
    return learned["name"] == now.get("name") and recipes[0] == recipes[1] and all(same)


def cases_learned_before(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the cases whose labels weights have learned and the run does not train on, by the names of its data.

    - ``before``, ``now``: what runs record of their data
    """
    found = set[str]().union(*(_cases_in(own, now) for own in sets_learned(before)))
    return found - {*now.get("train", ())}


def _cases_in(learned: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the cases of a run's data that are among those of one of ``sets_learned``."""
    cases, theirs, ours = {*learned["train"]}, learned["digests"], now.get("digests", {})
    found = cases if learned["name"] == now.get("name") else set[str]()
    recipes = (json.loads(json.dumps(described.get("recipe"))) for described in (learned, now))  # lists, not tuples
    if next(recipes) == next(recipes):  # prepared alike, a scan has one digest
        contents = {*theirs.values()}
        known = ours.keys() if contents else set[str]()
        found = (found - known) | {case for case in known if ours[case] in contents}
    known_scans = {case: digests for case, digests in learned.get(VOXELS, {}).items() if case in cases}
    same = same_scans(now.get(VOXELS, {}), known_scans)
    found = {case for case in found if case not in same or case not in known_scans}
    return found | {case for case, names in same.items() if names}


def same_scans(scans: Mapping[str, str], known: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns, for each case, the names of known cases with the same voxels; of several channels, one may have fewer.

    - ``scans``, ``known``: digests of the voxels of each case
    """
    parts, having = {name: {*text.split()} for name, text in known.items()}, defaultdict[str, set[str]](set)
    for name, digests in parts.items():
        for digest in digests:
            having[digest].add(name)
    found = dict[str, set[str]]()
    for case, text in scans.items():
        own = {*text.split()}
        near = {name for digest in own & having.keys() for name in having[digest]}
        found[case] = {name for name in near if own <= parts[name] or parts[name] <= own}
    return found


def other_scans(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the cases of a run's data that no longer are the scans of these names on which it began.

    - ``before``, ``now``: what it recorded of its data, and records now
    """
    scans, found = now.get(VOXELS, {}), set[str]()
    for name, own in scans.items():
        known = {str(n): one[VOXELS][name] for n, one in enumerate([before, *before.get(ANCESTORS, ())])
                 if name in one.get(VOXELS, {})}  # fmt: skip
        if known and not same_scans({name: own}, known)[name]:
            found.add(name)
    return found


def cases_that_differ(*described: Mapping[str, Any]) -> list[str]:
    """Returns the cases that have one name in several of the runs' data, and other voxels; where they were prepared
    in several ways, other files.

    - ``described``: what each run records of its data
    """
    known = defaultdict[str, set[tuple[str, ...]]](set)  # of each case: the recipe, its digest by that, and its files'
    for own in described:
        recipe, digests, files = json.dumps(own.get("recipe")), own.get("digests") or {}, own.get(FILE_DIGESTS) or {}
        for name in digests.keys() | files.keys():
            known[name].add((recipe, str(digests.get(name, "")), str(files.get(name, ""))))
    return sorted(name for name, own in known.items() if any(_differ(*pair) for pair in combinations(own, 2)))


def _differ(one: Sequence[str], other: Sequence[str]) -> bool:
    """Returns whether a case differs between two runs, which know it by its recipe, its digest by that, its files'."""
    known_by = 1 if one[0] == other[0] else 2
    return "" not in (one[known_by], other[known_by]) and one[known_by] != other[known_by]


def changed_between(*described: Mapping[str, Any]) -> str:
    """Returns which cases of a data set changed between trainings, in words; "" if none did.

    - ``described``: what each run records of its data
    """
    cases = sorted({case for some in _of_each_set(described).values() for case in cases_that_differ(*some)})
    return f"{quantity(len(cases), 'case')}, such as {cases[0]}, changed between these trainings" if cases else ""


def several_data(*described: Mapping[str, Any]) -> str:
    """Returns that runs were trained on several data sets, in words; "" if they were not, as far as is known.

    - ``described``: what each run records of its data
    """
    sets = _of_each_set([own for own in described if own.get("name")])
    # with the scans of each: one data set may have two names
    names = {name: {scan for own in some for scan in own.get(VOXELS, {}).values()} for name, some in sets.items()}
    differ = any(one and other and not one & other for one, other in combinations(names.values(), 2))
    return f"these runs were trained on several data sets: {', '.join(names)}" if differ else ""


def not_one_split(contents: Sequence[Mapping[str, Any]]) -> str:
    """Returns which cases several folds hold out, or no fold holds out and only some train on, in words; else "".

    - ``contents``: of the config.json of each fold
    """
    described = [content["dataset"] for content in contents if "dataset" in content]
    is_sample = any(content.get("config", {}).get("train_cases") for content in contents)
    times = Counter(case for own in described for case in own.get("held_out", ()))
    sides = [{*own.get("train", ()), *own.get("held_out", ())} for own in described]
    twice = sorted(case for case in times if times[case] > 1)
    apart = sorted(set[str]().union(*sides).difference(times, set.intersection(*sides) if sides else ()))
    told = [f"several of these folds hold out {quantity(len(twice), 'case')}, such as {twice[0]}"] if twice else []
    if apart and not is_sample:
        told.append(f"no fold holds out {quantity(len(apart), 'case')}, such as {apart[0]}, which only some train on")
    return "; ".join(told)


def _of_each_set(described: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns what runs record of their data, by data set: two of one name have no scan in common, and each its folder.

    Other data sets may have other cases of the same names.
    """
    groups = list[list[Mapping[str, Any]]]()
    for own in described:
        for group in groups:
            if any(_are_of_one_set(own, other) for other in group):
                group.append(own)
                break
        else:
            groups.append([own])
    names = [str(group[0].get("name", "")) for group in groups]
    places = [
        f" (prepared in {group[0].get('prepared')})" * (names.count(name) > 1) for name, group in zip(names, groups)
    ]
    return {f"{name}{place}": group for name, place, group in zip(names, places, groups)}


def _are_of_one_set(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.get("name") != other.get("name"):
        return False
    scans, known = ({*described.get(VOXELS, {}).values()} for described in (one, other))
    return bool(one.get("prepared") == other.get("prepared") or not scans or not known or scans & known)


def cases_of_other_fold(fold: str, now: str, described: Mapping[str, Any]) -> set[str]:
    """Returns the cases held out by fold ``now``, where nnU-Net trained weights on another fold; "": on other data."""
    return set(described["held_out"]) if fold and fold != now and now.isdecimal() else set()


def about_cases_learned(learned: Collection[str], now: Mapping[str, Any]) -> list[str]:
    """Returns a caution about cases held out or kept for tests whose labels the weights have learned, if any."""
    if not (cases := sorted({*now.get("held_out", ()), *now.get("test", ())} & {*learned})):
        return []
    scores = "whose scores therefore say nothing of new cases"
    return [f"caution: they have learned from {quantity(len(cases), 'held-out case')}, such as {cases[0]}, {scores}"]


def describe_cases_behind(path: str | Path) -> str:
    """Returns which cases' labels a file of weights has learned, or that it is not known.

    "" of a pretraining, which learned none, and of somebody else's weights.
    """
    behind = read_dataset(path)
    cases = [case for own in sets_learned(behind) for case in own["train"]]
    told = [f"they have learned from {quantity(len(cases), 'case')}, such as {cases[0]}"] if cases else []
    return "; ".join([*told, *[CASES_UNKNOWN] * are_cases_unknown(path, behind)])


def are_cases_unknown(path: str | Path, behind: Mapping[str, Any]) -> bool:
    """Returns whether weights of ours, or what these began with, do not say from which cases they have learned.

    - ``behind``: what ``read_dataset`` knows of their file
    """
    if behind.get(IS_UNKNOWN):
        return True
    is_pretraining = behind and not behind.get("labels") and not behind.get("volume_classes")
    return "train" not in behind and not is_pretraining and bool(read_facts(path))


def _names(described: Mapping[str, Any], what: str) -> list[str]:
    if what == "channels":
        return list(described.get("modalities", ()))
    if what == "classes":
        return list((described.get("volume_classes") or {}).get("names", ()))
    labels: dict[str, int] = described.get("labels", {})
    return sorted(labels, key=lambda name: labels[name])


def _facts(settings: Any) -> dict[str, Any]:
    facts = {name: settings[name] for name in _FACTS if name in settings}
    if isinstance(facts.get("patch"), int):  # of a cube, in the configs of earlier runs
        facts["patch"] = [facts["patch"]] * 3
    return facts


def differing_flags(facts: Mapping[str, Any], config: Config) -> tuple[str, str]:
    """Returns the flags in which a network of the same shapes computes otherwise, with theirs and the config's values.

    - ``facts``: of the file with their weights, as ``read_facts`` returns them
    """
    own = asdict(config)
    asked = [*_ENCODER, *(["skips"] if facts.get("decoder") == own["decoder"] else [])]
    names = [name for name in asked if name in facts and facts[name] != own[name] and _acts(config, name)]
    if "network" in names:
        names = ["network"]
    theirs, ours = (" ".join(f"--{name} {values[name]}" for name in names) for values in (facts, own))
    return theirs, ours


def _acts(config: Config, name: str) -> bool:
    """Returns whether a setting's value is that of the config's network: one that knows no windows has none."""
    return name == "window" or setting_applies(config, name)


def origin_of(content: Mapping[str, Any]) -> str:
    """Returns what tells a run from others, by how it began; "" if ``content``, its config.json's, does not say."""
    begin = content.get("history", [])[:1]
    return hashlib.blake2b(json.dumps(begin, sort_keys=True).encode(), digest_size=8).hexdigest() if begin else ""
