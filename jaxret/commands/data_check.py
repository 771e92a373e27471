"""Says what a data set is, what is in it and what is wrong with it; with a bad record, exit status 1:

jaxret data check FOLDER_OR_FILE
"""

from absl import flags

ARGUMENTS = {"SRC": "folder, file or set (tfds:, irds:, hf: and a name); FORMAT:PATH forces a format"}
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "model folder, package:NAME/FOLDER or hub name; without, words are counted"
)
_LENGTHS = flags.DEFINE_list("lengths", ["32", "64", "128", "256", "512"], "limits in tokens, and what they would cut")


def main(source: str) -> None:
    if not all(limit.isdecimal() for limit in _LENGTHS.value):
        found = ",".join(_LENGTHS.value)
        raise ValueError(f"--lengths={found}: numbers of tokens are expected, with commas between them")
    if _LENGTHS.present and not _TOKENIZER.value:
        raise ValueError("--lengths are limits in tokens, which only a --tokenizer can count: give one")
    from jaxret.tools.data_check import tell

    tell(source, _TOKENIZER.value, [int(limit) for limit in _LENGTHS.value])
