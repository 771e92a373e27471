"""Execute a notebook and additional cells in a Jupyter kernel, and write it with its outputs:

python tests/execute_notebook.py NOTEBOOK OUT CELL...

This script imports nothing from jaxret: it runs in the environment of requirements-clients.txt, which has nbclient.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_, source, out, *cells = sys.argv
notebook = nbformat.read(source, as_version=4)
notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(Path(out).parent)}}).execute()
nbformat.write(notebook, out)
