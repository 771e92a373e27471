"""`jaxret train` from a clone: python train.py --config=configs/mlr.py --workdir=runs/mlr (-h lists the flags)."""

from jaxret.__main__ import main

if __name__ == "__main__":
    main("train")
