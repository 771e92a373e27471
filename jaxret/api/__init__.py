"""jaxret from Python: a `Retriever` turns texts into vectors, an `Index` finds the best passages. docs/python.md has
examples, which the tests run.

Both keep what they opened: parameters, compiled programs, vectors, and the position of each passage's text. A text of a
new length compiles a program, and so does a new number of texts (1, to 8, to 16, ...); nothing else does after the
first search.
"""

from jaxret.api.index import Hit, Index
from jaxret.api.retriever import Retriever
from jaxret.data.records import Passage
from jaxret.index.encode_options import EncodeOptions
from jaxret.search.search_options import SearchOptions

__all__ = ["EncodeOptions", "Hit", "Index", "Passage", "Retriever", "SearchOptions"]
