"""Writes a data set as a versioned one of TFDS, which is read in place, by row:

jaxret data build SRC FOLDER --version=1.0.0

FOLDER may then be named wherever data is taken.
"""

from absl import flags

ARGUMENTS = {
    "SRC": "folder, file or set (tfds:, irds:, hf: and a name); FORMAT:PATH forces a format",
    "FOLDER": "to write; its name is the set's: small letters, digits and _",
}
_VERSION = flags.DEFINE_string("version", "1.0.0", "of the data set; none is overwritten")
_SPLIT = flags.DEFINE_string("split", "train", "what to call a training file")
_ON_ERROR = flags.DEFINE_enum("on_error", "error", ["error", "skip"], "what to do with bad records")


def main(source: str, folder: str) -> None:
    from jaxret.data.formats import Policy
    from jaxret.data.formats.build import build

    policy = Policy(_ON_ERROR.value)
    print(build(source, folder, _VERSION.value, _SPLIT.value, policy))
    if policy.report():
        print(policy.report())
