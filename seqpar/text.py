"""Words for people: counts with their noun, durations, the flag of a setting, time limits as Slurm writes them."""

import math
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def clock(seconds: float) -> str:
    """Returns 1:02:03 or 2:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def quantity(number: int, noun: str, spec: str = "") -> str:
    """Returns "1 rank", "2 ranks", "2 batches" or "2 classes".

    - ``noun``: what is counted, in the singular
    - ``spec``: of the number's format, such as "," for thousands
    """
    plural = "es" if noun.endswith(("tch", "ss")) else "s"
    return f"{number:{spec}} {noun}{'' if number == 1 else plural}"


def rounded(number: float, places: int) -> str:
    """Returns a number with ``places`` decimals, or "–" for NaN, which stands for no score."""
    return "–" if math.isnan(number) else f"{number:.{places}f}"


def with_minus(text: str) -> str:
    """Returns the text with a minus sign before negative numbers, for which programs write a hyphen."""
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", text)


def name_images(modalities: Sequence[str]) -> list[str]:
    """Returns modalities as people read them: "channel 0" and so on stand for none, and become "image 1" and so on."""
    if any(name != f"channel {n}" for n, name in enumerate(modalities)):
        return list(map(str, modalities))
    return ["image"] if len(modalities) == 1 else [f"image {n + 1}" for n in range(len(modalities))]


def list_modalities(modalities: Sequence[str]) -> str:
    """Returns the modalities, or how many there are without a name."""
    if (shown := name_images(modalities)) == list(map(str, modalities)):
        return ", ".join(shown)
    return "1, unnamed" if len(shown) == 1 else f"{len(shown)}, unnamed"


def millilitres(volume: float) -> str:
    """Returns a volume in ml with three digits, from 100 ml on in whole ml."""
    return f"{volume:.0f}" if abs(volume) >= 100 else f"{volume:.3g}"


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra; in a checkout, pip would ask its index for the package."""
    try:
        version("seqpar")
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'seqpar[{extra}]'"


def flag_name(name: str) -> str:
    """Returns a setting's name as the command line spells it."""
    return name.replace("_", "-")


# The library's arguments that a command line sets, by name, with their flags.
_SETTINGS = """
    attention batch checkpoint device drop_path dropout embed_dim force heads_per_chunk keep_kv mask_ratio mlp
    mlp_chunks mode objective patch pipe placement positions seqpar skips split sums tile token_order window
"""
_FLAGS = {name: flag_name(name) for name in _SETTINGS.split()} | {
    "check": "debug-collectives",
    "depth": "stage-depths",
    "num_heads": "heads",
    "num_ranks": "seqpar",
    "recompute": "grad-checkpoint",
    "schedule": "pipe-schedule",
}
_ARGUMENT = re.compile(r"`(\w+)`|(?<![\w/.-])(\w+)=(\([^()]*\)|'[^']*'|[\w.:+-]*\w)(?![\w/])")


def in_flags(text: str) -> str:
    """Returns an error of the library with flags in place of arguments, for someone who typed flags.

    ``tile=(16, 8, 24)`` becomes ``--tile 16 8 24``, ``keep_kv=True`` becomes ``--keep-kv``, and an argument's name in
    backticks becomes its flag.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match[1] or match[2], match[3] or ""
        if name not in _FLAGS:
            return match[0]
        words = re.sub(r"[(),']", " ", value).split() if value != "True" else []
        return " ".join([f"--{_FLAGS[name]}", *words])

    return _ARGUMENT.sub(flag, text)


def format_sides(sides: Sequence[int], by: str = " ") -> str:
    """Returns the sides of a box in short: one number for a cube."""
    return by.join(map(str, sides if len(set(sides)) > 1 else sides[:1]))


def parse_duration(text: str) -> float:
    """Returns a time limit in seconds: minutes, H:MM:SS or D-HH:MM:SS; infinity for "none" or an empty text."""
    if text in ("", "none"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text) * 60
    elif match:
        days, hours, minutes, rest = (int(piece or 0) for piece in match.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        raise ValueError(f"--time-limit {text}: give minutes (110), H:MM:SS (1:50:00) or none")
    if not seconds:
        raise ValueError(f"--time-limit {text}: it must be above 0; give none for no limit")
    return seconds
