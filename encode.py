"""`jaxret encode` from a clone: python encode.py --workdir=runs/mlr --corpus=FOLDER_OR_FILE (-h lists the flags)."""

from jaxret.__main__ import main

if __name__ == "__main__":
    main("encode")
