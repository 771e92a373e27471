"""Draws a picture from the files of runs, as OUT.svg and OUT.png (needs matplotlib: pip install 'jaxret[plots]'):

jaxret plot sweep runs/layers                                    quality over the keys of a sweep
jaxret plot training runs/mlr runs/mvr                           loss, learning rate and dev measure over steps
jaxret plot annealing runs/mvr                                   temperatures over steps
jaxret plot winners runs/mlr                                     how often each vector wins (after jaxret diversity)
jaxret plot weights mix=runs/mix-1,runs/mix-2                    weights of pooling scalar_mix (after jaxret diversity)
jaxret plot words runs/agg --passage="Text of a passage."        weights of words over the text
jaxret plot domains cls=runs/a agg=runs/b --x=msmarco --y=scifact.test,fiqa.test --measures=RR@10,nDCG@10

NAME=RUN,RUN names a system of several seeds. jaxret report has pictures of quality, storage and latency.
"""

from absl import flags

from jaxret.cli.flags import OptionFlags
from jaxret.experiments.pictures.picture_options import PictureOptions

ARGUMENTS = {
    "KIND": "sweep, training, annealing, winners, weights, words or domains",
    "RUN...": "folders of runs, or NAME=RUN,RUN; the folder of a sweep",
}

_OUT = flags.DEFINE_string("out", "", "path of the picture without ending; default: KIND in the current folder")
_OPTIONS = OptionFlags(PictureOptions)


def main(kind: str, *runs: str) -> None:
    from jaxret.experiments.pictures.draw import draw

    print(f"picture: {draw(kind, runs, _OUT.value, _OPTIONS())}")
