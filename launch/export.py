"""Packs a trained run into one file to hand on: ``python launch/export.py RUN OUT.zip``."""

from seqpar.cli.export import main

if __name__ == "__main__":
    main()
