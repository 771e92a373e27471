"""jaxret from Python: a `Retriever` turns texts into vectors, and an `Index` finds the best passages. docs/python.md
has examples, which the tests run.

Both keep in memory what they opened: parameters, compiled programs, vectors, and the position of each passage's text.
After the first search, a program is compiled only for a new padded length of a text, or a new padded number of texts
(1, 8, 16, ...).
"""

from jaxret.api.index import Hit, Index
from jaxret.api.retriever import Retriever
from jaxret.data.records import Passage
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.search.search_options import SearchOptions

__all__ = ["EncodeOptions", "Hit", "Index", "Passage", "Retriever", "SearchOptions"]
