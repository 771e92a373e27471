"""Data sets that libraries keep, by name: tfds:NAME, irds:NAME, hf:NAME (`named.py`), and writing one (`tfds.py`)."""
