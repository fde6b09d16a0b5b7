"""Predicts with a trained run: ``torchrun launch/predict.py RUN -i IMAGES -o FOLDER``."""

from seqpar.cli.predict import main

if __name__ == "__main__":
    main()
