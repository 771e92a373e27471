"""Writes a data set in another format, and counts what that format cannot hold:

jaxret data convert SRC DST --to=FORMAT
"""

from absl import flags

from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

WRITES = ("DST",)
ARGUMENTS = {
    "SRC": "folder, file or named data set (tfds:, irds: or hf: and a name); FORMAT:PATH forces a format",
    "DST": "file (plain, .gz, .zst or .parquet) or folder to write",
}
_TO = flags.DEFINE_string(
    "to", None, "beir, msmarco, tevatron or dpr for a folder, or the name of a file format", required=True
)
_SPLIT = define_flag(shared_options.split("train", "split to convert, or name of the split of a training file"))
_ROLE = flags.DEFINE_string("role", "", "records to convert: passages, queries, judgements, examples or rankings")
_ON_ERROR = define_flag(shared_options.on_error())


def main(source: str, destination: str) -> None:
    from jaxret.data.formats import DataSource, Policy
    from jaxret.data.formats.convert import convert_data
    from jaxret.parallel.events import emit
    from jaxret.storage.atomic import require_parent

    require_parent(destination, "DST")
    policy = Policy(_ON_ERROR.value)
    conversion = convert_data(DataSource.open(source), destination, _TO.value, _SPLIT.value, _ROLE.value, policy)
    print(conversion)
    emit("conversion", source=conversion.source, records=conversion.records, lost=conversion.losses)
    if policy.report():
        print(policy.report())
