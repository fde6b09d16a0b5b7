"""Attacks with values: flags, files and tables whose content is wrong, too large or meaningless."""

from tests.attacks.attack import TINY, Attack

ATTACKS = [
    Attack("a seed beyond 64 bits", types="train --seed 99999999999999999999", code=2, says="--seed 9999"),
    *[
        Attack(
            f"{program} {flag} {value}",
            types=f"{program} {line} {flag} {value}",
            code=2,
            says=f"{flag} {value}: {words}",
        )
        for program, line, flag, value, words in (
            ("train", TINY, "--time-limit", "0", "it must be above 0"),
            ("train", f"{TINY} --dry-run", "--time-limit", "0:00:00", "it must be above 0"),
            ("pretrain", "--preset debug --device cpu", "--time-limit", "0.0", "it must be above 0"),
            ("tune", "--space lr=1,2", "--time-limit", "0", "it must be above 0"),
            ("tune", "--space lr=1,2", "--devices", "0", "it must be at least 1"),
            ("tune", "--space lr=1,2 --ray x:1", "--ray-nodes", "0", "it must be at least 1"),
            ("tune", "--space lr=1,2", "--ray", "nonsense", "give the HOST:PORT"),
            ("tune", "--space lr=1,2", "--ray", "ray://x:1", "give the HOST:PORT"),
        )
    ],
]
