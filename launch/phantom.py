"""Writes a phantom data set: ``python launch/phantom.py --cases 24 --out DIR``."""

from seqpar.cli.phantom import main

if __name__ == "__main__":
    main()
