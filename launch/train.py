"""Trains: ``torchrun launch/train.py --seqpar 4 --patch 4``; without --data on built-in phantom brains."""

from seqpar.cli.train import main

if __name__ == "__main__":
    main()
