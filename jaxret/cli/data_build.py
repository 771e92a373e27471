"""Writes a data set as a versioned TFDS data set, whose rows are read from disk by number:

jaxret data build SRC FOLDER --version=1.0.0

FOLDER is then a source for every command that reads data.
"""

from absl import flags

from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

WRITES = ("FOLDER",)
ARGUMENTS = {
    "SRC": "folder, file or named data set (tfds:, irds: or hf: and a name); FORMAT:PATH forces a format",
    "FOLDER": "folder to write; its name is the name of the data set: lowercase letters, digits and _",
}
_VERSION = flags.DEFINE_string("version", "1.0.0", "version of the data set; an existing version is not overwritten")
_SPLIT = define_flag(shared_options.split("train", "name of the split, if SRC is a training file"))
_ON_ERROR = define_flag(shared_options.on_error())


def main(source: str, folder: str) -> None:
    from jaxret.data.formats import DataSource, Policy
    from jaxret.data.formats.build_data_set import build_data_set
    from jaxret.parallel.events import emit

    policy = Policy(_ON_ERROR.value)
    conversion = build_data_set(DataSource.open(source), folder, _VERSION.value, _SPLIT.value, policy)
    print(conversion)
    emit("conversion", source=conversion.source, records=conversion.records, lost=conversion.losses)
    if policy.report():
        print(policy.report())
