"""Trains and evaluates: `python train.py fit -c configs/lm/debug.yaml` is `lin-attn fit -c configs/lm/debug.yaml`."""

import sys

from models.cli import main

if __name__ == "__main__":
    sys.exit(main())
