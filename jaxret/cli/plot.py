"""Draws a picture from the files of runs, as OUT.svg and OUT.png (needs matplotlib: pip install 'jaxret[plots]'):

jaxret plot sweep runs/layers                                    quality over the keys of a sweep
jaxret plot training runs/mlr runs/mvr                           loss, learning rate and dev measure over steps
jaxret plot annealing runs/mvr                                   temperatures over steps
jaxret plot winners runs/mlr                                     how often each vector wins (after jaxret diversity)
jaxret plot weights mix=runs/mix-1,runs/mix-2                    weights of pooling scalar_mix (after jaxret diversity)
jaxret plot words runs/agg --passage="Text of a passage."        weights of words over the text
jaxret plot domains cls=runs/a agg=runs/b --x=msmarco --y=scifact.test,fiqa.test --measures=RR@10,nDCG@10

NAME=RUN,RUN names a system of several seeds.
"""

from absl import flags

from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

ARGUMENTS = {
    "KIND": "sweep, training, annealing, winners, weights, words or domains",
    "RUN...": "folders of runs, or NAME=RUN,RUN; the folder of a sweep",
}

_OUT = flags.DEFINE_string("out", "", "path of the picture without ending; default: KIND in the current folder")
_MEASURES = flags.DEFINE_list("measures", [], "sweep: the measure; domains: one measure for both axes, or one for each")
_X = flags.DEFINE_list(
    "x", [], "domains: results in the domain of training (eval/NAME.json); of several results, their mean"
)
_Y = flags.DEFINE_list("y", [], "domains: results of other domains")
_PASSAGE = flags.DEFINE_string("passage", "", "words: text of the passage")
_TITLE = flags.DEFINE_string("title", "", "words: title of the passage")
_CHECKPOINT = define_flag(shared_options.checkpoint())


def main(kind: str, *runs: str) -> None:
    from jaxret.experiments.pictures.draw import PictureOptions, draw

    results = tuple(_X.value), tuple(_Y.value)
    options = PictureOptions(tuple(_MEASURES.value), *results, _PASSAGE.value, _TITLE.value, _CHECKPOINT.value)
    print(f"picture: {draw(kind, runs, _OUT.value, options)}")
