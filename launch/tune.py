"""Compares settings: ``python launch/tune.py --space lr=1e-4,1e-3 amsgrad=no,yes --out sweeps/first``."""

from seqpar.cli.tune import main

if __name__ == "__main__":
    main()
