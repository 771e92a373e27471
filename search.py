"""`jaxret search` from a clone: python search.py --workdir=runs/mlr --query="..." (-h lists the flags)."""

from jaxret.__main__ import main

if __name__ == "__main__":
    main("search")
