"""Pretrains an encoder without labels: ``torchrun launch/pretrain.py --seqpar 4 --preset mae``; flags as train's."""

from seqpar.cli.pretrain import main

if __name__ == "__main__":
    main()
