"""What a training step launches on a GPU and the bytes that its kernels move, by source, counted without a device."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from lab.benches.series import Row, Runs, Series, alternate
from seqpar.planner.launch_counter import UPDATE, Launches, count_launches
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS

MODERN = replace(PRESETS["modern"](), batch=1)
STEPS = {
    "paper, patch 4, bf16": replace(PRESETS["paper"](), batch=1, patch=(4, 4, 4), precision="bf16"),
    "modern, patch 4": replace(MODERN, patch=(4, 4, 4)),
    "modern, tile 160": replace(MODERN, tile=(160, 160, 160)),
}
# a source, and whether a place in the package and an operator belong to it; the first that fits counts
SOURCES: dict[str, Callable[[str, str], bool]] = {
    "update, with the norm of all gradients": lambda place, _: place == UPDATE,
    "loss": lambda place, _: place.startswith("losses/"),
    "norms, activations and voxels of the decoder": lambda place, name: (
        place.startswith(("spatial/", "decoders/")) and name not in ("convolution", "convolution_backward", "_to_copy")
    ),
    "convolutions": lambda _, name: name in ("convolution", "convolution_backward"),
    "casts": lambda _, name: name in ("_to_copy", "_foreach_copy_"),
    "layer norms": lambda _, name: name.startswith("native_layer_norm"),
    "matrix products": lambda _, name: name in ("mm", "addmm"),
    "sums for biases": lambda place, name: place.startswith("parallel/half") and name == "sum",
    "rotary positions": lambda place, _: "rotate" in place,
    "attention": lambda place, name: place.startswith("attention/") or "attention" in name,
    "GELU": lambda _, name: name.startswith("gelu"),
    "residual sums, LayerScale, dropped paths": lambda place, _: place.startswith(("vit/blocks", "parallel/half")),
    "the rest": lambda *_: True,
}


def series(quick: bool = False) -> list[Series]:
    """Returns one series for each step: a row for each source, and their sum."""
    steps = dict(list(STEPS.items())[:1]) if quick else STEPS
    return [_of(name, config) for name, config in steps.items()]


def _of(name: str, config: Config) -> Series:
    counted = list[Launches]()

    def measure(source: str) -> tuple[int, int]:
        if not counted:
            counted.append(count_launches(config)[-1])
        launches, moved = by_source(counted[0])
        return (launches.total(), moved.total()) if source == "all" else (launches[source], moved[source])

    def row(source: str, runs: Runs) -> Row:
        launches, moved = runs[source][-1]
        return {"source": source, "launches": launches, "GB": round(moved / 1e9, 2)}

    cases = ("all", *SOURCES)
    return Series(f"launches of a step, {name}", cases, 1, 15.0, lambda turns: alternate(cases, measure, turns), row)


def by_source(counted: Launches) -> tuple[Counter[str], Counter[str]]:
    """Returns launches and bytes of a step by source."""
    launches, moved = Counter[str](), Counter[str]()
    for (place, name), (times, size) in counted.by_place.items():
        source = next(source for source, fits in SOURCES.items() if fits(place, name))
        launches[source] += times
        moved[source] += size
    return launches, moved
