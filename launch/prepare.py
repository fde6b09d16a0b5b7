"""Prepares a data set for training: ``python launch/prepare.py DATA [--out CACHE]``."""

from seqpar.cli.prepare import main

if __name__ == "__main__":
    main()
