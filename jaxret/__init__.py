"""jaxret: dense passage retrieval with JAX, from text to an exact top-k."""

__version__ = "0.1.0"
