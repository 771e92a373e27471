"""Serves runs over HTTP, with a web page at /:

jaxret serve runs/mlr                              OpenAI's and TEI's interfaces, /search, /explain, and the page
jaxret serve runs/mlr runs/dual runs/cross         several runs; a cross-encoder answers /rerank
JAXRET_TOKEN=... jaxret serve runs/mlr --host=0.0.0.0    for other machines; they send the token

Needs `pip install 'jaxret[serve]'`. docs/serving.md has the routes and examples.
"""

from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.search.search_options import SearchOptions
from jaxret.serving.serve_options import ServeOptions

ARGUMENTS = {
    "WORKDIR...": "folders of runs; the name of a model is the last part of its folder, or NAME in NAME=FOLDER"
}
_CORPUS = define_flag(shared_options.encoded_corpus())
_CHECKPOINT = define_flag(shared_options.checkpoint())
_PLATFORM = define_flag(shared_options.platform())
_SERVER = OptionFlags(ServeOptions)
_SEARCH = OptionFlags(SearchOptions)


def main(*workdirs: str) -> None:
    from importlib.util import find_spec

    from jaxret.parallel.processes import require_platform

    if packages := [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise ValueError(f"jaxret serve needs {packages[0]}, which is not installed: pip install 'jaxret[serve]'")
    require_platform(_PLATFORM.value, "--platform")

    from jaxret.serving.server import serve

    serve(workdirs, _CORPUS.value, _CHECKPOINT.value, _SERVER(), _SEARCH())
