"""Writes a data set in another format; what that cannot hold is counted:

jaxret data convert SRC DST --to=FORMAT
"""

from absl import flags

ARGUMENTS = {
    "SRC": "folder, file or set (tfds:, irds:, hf: and a name); FORMAT:PATH forces a format",
    "DST": "file (plain, .gz, .zst or .parquet) or folder to write",
}
_TO = flags.DEFINE_string("to", None, "a folder of beir, msmarco, tevatron or dpr, or a format's name", required=True)
_SPLIT = flags.DEFINE_string("split", "train", "which, or what to call a training file")
_ROLE = flags.DEFINE_string("role", "", "passages, queries, judgements, examples or rankings")
_ON_ERROR = flags.DEFINE_enum("on_error", "error", ["error", "skip"], "what to do with bad records")


def main(source: str, destination: str) -> None:
    from jaxret.data.formats import Policy
    from jaxret.data.formats.convert import convert

    policy = Policy(_ON_ERROR.value)
    print(convert(source, destination, _TO.value, _SPLIT.value, _ROLE.value, policy))
    if policy.report():
        print(policy.report())
