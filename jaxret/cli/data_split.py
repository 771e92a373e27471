"""Splits judgements by whether the relevant passages are also relevant to training queries, as in table 4 of I3:

jaxret data split --train=FOLDER --qrels=FOLDER --out=FOLDER     writes qrels.set0.tsv (none is) and qrels.set1.tsv
"""

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

_TRAIN = flags.DEFINE_string(
    "train", None, "folder or file with training queries and their relevant passages", required=True
)
_QRELS = flags.DEFINE_string("qrels", None, "folder or file with the judgements to split", required=True)
_OUT = shared_flags.out_folder("folder to write")
_TRAIN_SPLIT = flags.DEFINE_string("train_split", "train", "split of --train, if it is a folder")
_SPLIT = define_flag(shared_options.split("test", "split of --qrels, if it is a folder"))
_ON_ERROR = define_flag(shared_options.on_error())


def main() -> None:
    from jaxret.data.formats import JudgementSource, Policy
    from jaxret.data.split_judgements import write_judgement_sets

    policy = Policy(_ON_ERROR.value)
    train = JudgementSource.open(_TRAIN.value, _TRAIN_SPLIT.value)
    qrels = JudgementSource.open(_QRELS.value, _SPLIT.value)
    write_judgement_sets(train, qrels, _OUT.value, policy)
    if policy.report():
        print(policy.report())
