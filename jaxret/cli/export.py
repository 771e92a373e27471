"""Exports a run to the files of another library, reads them back, and compares the vectors:

jaxret export --workdir=runs/mlr --to=sentence-transformers --out=FOLDER

Exports an encoded corpus, with texts and metadata, to a vector store, and compares the store's exact search with
jaxret's (docs/stores.md):

jaxret export --workdir=runs/mlr --to=parquet --out=FOLDER
"""

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.export.stores.store_list import STORES
from jaxret.export.stores.store_options import StoreOptions

_WORKDIR = define_flag(shared_options.workdir("folder of a trained run"))
_TO = flags.DEFINE_enum(
    "to",
    None,
    ["hf", "sentence-transformers", "onnx", "pylate", "peft", "orbax", "pyserini", "anserini", *STORES],
    "library or store to export to",
    required=True,
)
_OUT = shared_flags.out_folder(
    "new folder to write; for a store: the journal, and the files of a store without a server"
)
_CORPUS = define_flag(shared_options.encoded_corpus())
_QUERIES = define_flag(
    shared_options.queries("none; --to=anserini exports queries, and stores search for them in the comparison")
)
_CHECKPOINT = define_flag(shared_options.checkpoint())
_OPTIONS = OptionFlags(StoreOptions)


def main() -> None:
    from jaxret.data.formats import QuerySource
    from jaxret.export.export import export
    from jaxret.parallel.events import emit
    from jaxret.storage.buckets.address import is_bucket_address
    from jaxret.storage.buckets.working_copy import shown_path

    queries = QuerySource.open(_QUERIES.value) if _QUERIES.value else None
    text = export(_WORKDIR.value, _TO.value, _OUT.value, _CHECKPOINT.value, _CORPUS.value, queries, _OPTIONS())
    print(text)
    if is_bucket_address(address := shown_path(_OUT.value)):
        print(f"other programs cannot read it in the bucket: `jaxret copy {address} FOLDER` makes their files")
    emit("export", to=_TO.value, path=_OUT.value, notes=text.splitlines())
