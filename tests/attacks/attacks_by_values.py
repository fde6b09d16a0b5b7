"""Attacks with values: flags, files and tables whose content is wrong, too large or meaningless."""

from tests.attacks.attack import Attack

ATTACKS = [
    Attack("a seed beyond 64 bits", types="train --seed 99999999999999999999", code=2, says="--seed 9999"),
]
