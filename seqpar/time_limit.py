"""Time limits as people and Slurm write them."""

import math
import re


def seconds(text: str) -> float:
    """Returns a time limit in seconds: minutes, H:MM:SS or D-HH:MM:SS; infinity for none."""
    if not text:
        return math.inf
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text) * 60
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if not match:
        raise ValueError(f"--time-limit {text}: give minutes (110) or H:MM:SS (1:50:00)")
    days, hours, minutes, rest = (int(piece or 0) for piece in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
