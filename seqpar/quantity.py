"""Numbers with the noun that they count, for what people read."""


def quantity(number: int, noun: str, spec: str = "") -> str:
    """Returns "1 rank", "2 ranks" or "2 batches".

    - ``noun``: what is counted, in the singular
    - ``spec``: of the number's format, such as "," for thousands
    """
    plural = "es" if noun.endswith("tch") else "s"
    return f"{number:{spec}} {noun}{'' if number == 1 else plural}"
