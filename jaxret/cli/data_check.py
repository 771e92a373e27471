"""Describes a data set, counts its records, and lists its problems; the exit status is 1 if a record is bad:

jaxret data check FOLDER_OR_FILE
jaxret data check FOLDER_OR_FILE --on_error=skip       count bad records by reason; the exit status is 0
"""

from absl import flags

ARGUMENTS = {"SRC": "folder, file or named data set (tfds:, irds: or hf: and a name); FORMAT:PATH forces a format"}
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "model folder, package:NAME/FOLDER or hub name; default: count words instead of tokens"
)
_LENGTHS = flags.DEFINE_list(
    "lengths",
    ["32", "64", "128", "256", "512"],
    "length limits in tokens; the output has the number of texts that each limit cuts",
)
_ON_ERROR = flags.DEFINE_enum(
    "on_error", "error", ["error", "skip"], "bad records: list all and exit with status 1, or count them by reason"
)


def main(source: str) -> None:
    if not all(limit.isdecimal() for limit in _LENGTHS.value):
        limits = ",".join(_LENGTHS.value)
        raise ValueError(f"--lengths={limits}: numbers of tokens are expected, with commas between them")
    if _LENGTHS.present and not _TOKENIZER.value:
        raise ValueError("--lengths are limits in tokens, which only a --tokenizer can count: give one")
    from jaxret.data.dataset_check import load_uncut_tokenizer, print_data_check
    from jaxret.data.formats import DataSource
    from jaxret.models.encoders.pretrained import find_model, resolve_encoder
    from jaxret.models.encoders.sentence_transformers import title_separator

    tokenizer = None
    if model := _TOKENIZER.value:
        encoder = resolve_encoder(model, weights=False)
        tokenizer = load_uncut_tokenizer(encoder, title_separator(find_model(model)))
    print_data_check(DataSource.open(source), tokenizer, [int(limit) for limit in _LENGTHS.value], _ON_ERROR.value)
