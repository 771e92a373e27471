"""Generates queries for the passages of a corpus with a T5 model (T5, Flan-T5, doc2query):

jaxret generate --model=FOLDER --corpus=FOLDER_OR_FILE --out=FOLDER
jaxret generate --model=FOLDER --corpus=FOLDER_OR_FILE --out=FOLDER --queries=5 --write=training --write=expanded

Run the same command again to continue an interrupted job. Any number of jobs may run it at the same time: each job
takes parts that no other job has, also those of dead jobs. With other values of --write, no query is generated again.
"""

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.mining.generation_options import GenerationOptions
from jaxret.models.generation.decoding_options import DecodingOptions

_MODEL = flags.DEFINE_string(
    "model", None, "folder of a T5 with its decoder: config.json, safetensors, tokenizer.json", required=True
)
_CORPUS = define_flag(shared_options.corpus(required=True))
_OUT = shared_flags.out_folder("folder to write")
_DECODING = OptionFlags(DecodingOptions)
_OPTIONS = OptionFlags(GenerationOptions)
_PLATFORM = define_flag(shared_options.platform())


def main() -> None:
    decoding, options = _DECODING(), _OPTIONS()
    from jaxret.data.formats import Corpus
    from jaxret.mining.generate_queries import generate_queries
    from jaxret.parallel.events import emit
    from jaxret.parallel.processes import require_platform

    require_platform(_PLATFORM.value, "--platform")
    result = generate_queries(_MODEL.value, Corpus.open(_CORPUS.value), _OUT.value, decoding, options)
    print(f"{result.queries:,} queries for {result.with_queries:,} of {result.passages:,} passages")
    emit(
        "generation",
        queries=result.queries,
        passages=result.passages,
        with_queries=result.with_queries,
        files=result.files,
    )
    for file in result.files:
        print(f"written: {file}")
