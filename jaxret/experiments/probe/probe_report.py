"""The table, the picture and the file of a probe."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from jaxret.configs import load_config
from jaxret.data.formats import Corpus
from jaxret.evaluation.comparison import format_p_value
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.evaluation_queries import EvaluationSource
from jaxret.experiments.pictures.canvas import (
    NO_MATPLOTLIB,
    add_legend,
    drawing_is_installed,
    line_style,
    new_picture,
    save_picture,
    use_whole_numbers,
)
from jaxret.experiments.probe.layer_quality import NDCG, RECALL, Choice, Quality
from jaxret.experiments.probe.layer_vectors import TOKEN_TITLES
from jaxret.experiments.probe.probe_options import ProbeOptions
from jaxret.experiments.probe.run_probe import Finding, Probe, probe_layers
from jaxret.experiments.vector_diversity import JudgedSource, has_several_vectors, report_diversity
from jaxret.models.heads.head import TOKENS
from jaxret.parallel.events import emit
from jaxret.runs.mismatch import flatten
from jaxret.runs.run import Run
from jaxret.storage.atomic import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURE = f"nDCG@{NDCG}"
SHOWN_WEIGHT = 0.005  # weights of a mixture below it are 0.00


def report_probe(
    run: Run, source: EvaluationSource, corpus: Corpus, options: ProbeOptions, progress: bool = True
) -> str:
    """Probe the layers of a run's encoder, write `eval/DATA.SPLIT.probe.json` and a picture beside it, and return the
    text to print.

    Args:
        run, source, corpus, options, progress: see `probe_layers`.
    """
    probe = probe_layers(run, source, corpus, options, progress)
    path = run.workdir.evaluation(f"{probe.name}.probe")
    results = probe_json(probe, options.corpus_size) | {"options": vars(options), "checkpoint": run.checkpoint}
    write_json(path, results)
    picture = f"no picture: {NO_MATPLOTLIB}"
    if drawing_is_installed():
        picture = f"picture: {save_picture(partial(probe_picture, results), path.with_suffix(''))}"
    emit("probe", path=path, findings=results["findings"])
    queries, passages = probe.data.relevance.shape
    lines = [
        f"{queries:,} queries, {passages:,} passages, layers 0 to {probe.data.last}",
        *_layer_tables(probe),
        _finding_table(probe, options.corpus_size),
        "",
        *_advice(run, probe),
        f"written to {path}",
        picture,
        *_winners(run, JudgedSource.of(source, corpus), progress),
    ]
    return "\n".join(lines)


def _winners(run: Run, data: JudgedSource, progress: bool) -> list[str]:
    """Return which vector of a passage wins, for a trained run with several; the probe is written already."""
    if not run.checkpoint["step"] or not has_several_vectors(run.model):
        return []
    try:
        report = report_diversity(run, data, progress)
    except ValueError as error:  # stricter than a probe: every relevant passage must be in the corpus
        report = f"not measured: {error}"
    return ["", "Which vector of a relevant passage wins (jaxret diversity):", "", report]


def probe_json(probe: Probe, corpus_size: int) -> dict[str, Any]:
    """Return everything that was measured, and the storage of every choice for a corpus of `corpus_size` passages."""

    def storage(quality: Quality) -> dict[str, int]:
        of_passage = probe.data.stored_bytes(quality.choice)
        return {"bytes_per_passage": of_passage, "corpus_bytes": corpus_size * of_passage}

    return {
        "dataset": {"name": probe.name, "sha256": probe.digests},
        "queries": len(probe.data.relevance),
        "held_out": len(probe.held_out),
        "passages": probe.data.relevance.shape[1],
        "corpus_size": corpus_size,
        "alone": [_quality_json(quality) | storage(quality) for quality in probe.alone],
        "pairs": [_quality_json(quality) | storage(quality) for quality in probe.pairs],
        "findings": [_finding_json(result, probe) | storage(result.quality) for result in probe.findings],
    }


def _quality_json(quality: Quality) -> dict[str, Any]:
    choice = quality.choice
    return {
        "layers": list(choice.layers),
        "token": choice.token,
        "normalize": choice.normalize,
        "pooling": choice.pooling,
        **({"weights": [round(weight, 4) for weight in choice.weights]} if choice.weights else {}),
        "vectors": choice.vectors,
        MEASURE: round(quality.mean(), 4),
        f"R@{RECALL}": round(float(quality.recall.mean()), 4),
    }


def _finding_json(result: Finding, probe: Probe) -> dict[str, Any]:
    values = {"name": result.name, **_quality_json(result.quality), "held_out": result.quality.mean(probe.held_out)}
    if comparison := result.comparison:
        interval = {"difference": comparison.difference, "low": comparison.low, "high": comparison.high}
        values |= {**interval, "p": comparison.p_permutation, "p_holm": result.p_value}
    return values


def _layer_tables(probe: Probe) -> list[str]:
    """Return nDCG and recall of every layer alone, a table for cosines and one for dot products; * marks the best of
    each."""
    lines: list[str] = []
    tokens = probe.data.queries.tokens
    for normalize, scores in ((True, "cosines"), (False, "dot products")):
        members = [quality for quality in probe.alone if quality.choice.normalize == normalize]
        qualities = {(quality.choice.layers[0], quality.choice.token): quality for quality in members}
        best = max(quality.mean() for quality in members)
        rows = []
        for layer in range(probe.data.last + 1):
            row = [qualities[layer, token] for token in tokens]
            cells = [
                (f"{one.mean():.4f}{'*' if one.mean() == best else ' '}", f"{one.recall.mean():.3f}") for one in row
            ]
            rows.append([str(layer), *chain.from_iterable(cells)])
        header = ["layer", *chain.from_iterable((TOKEN_TITLES[token], f"R@{RECALL}") for token in tokens)]
        lines += [
            "",
            f"{MEASURE} and R@{RECALL} of one layer on both sides, {scores}:",
            "",
            aligned_table(header, rows),
        ]
    return lines


def _finding_table(probe: Probe, corpus_size: int) -> str:
    """Return a row for each finding: its value on the queries that chose it, and on the other queries."""
    rows = []
    for result in probe.findings:
        quality, comparison = result.quality, result.comparison
        size = probe.data.stored_bytes(quality.choice)
        rows.append(
            [
                result.name,
                _describe(quality.choice),
                f"{quality.mean(probe.held_out):.4f}",
                f"{quality.recall[probe.held_out].mean():.4f}",
                f"{comparison.difference:+.4f}" if comparison else "",
                format_p_value(result.p_value) if comparison else "",
                str(quality.choice.vectors),
                f"{size:,}",
                f"{corpus_size * size / 1e9:,.3g} GB",
            ]
        )
    query_count = len(probe.data.relevance) - len(probe.held_out)
    header = ["", "layers", MEASURE, f"R@{RECALL}", "difference", "p (Holm)", "vectors", "bytes", f"{corpus_size:,}"]
    title = f"Chosen on {query_count:,} queries, measured on the other {len(probe.held_out):,}:"
    storage = f"bytes: of a passage's vectors in float32; {corpus_size:,}: of that many passages"
    return f"\n{title}\n\n{aligned_table(header, rows, left=2)}\n{storage}"


def _describe(choice: Choice) -> str:
    layers = f"1 to {choice.layers[-1]}" if choice.pooling == "mix" else ", ".join(map(str, choice.layers))
    return f"{layers}; {TOKEN_TITLES[choice.token]}; {'cosines' if choice.normalize else 'dot products'}"


def trained_keys(choice: Choice, config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """Return a config, and the keys of it that train one layer or a pair as it was probed with the run of a config.

    All that decides how the encoder reads a text is that of the run: its lengths, prompts, depth, direction.
    """
    is_pair = len(choice.layers) == 2
    name = "mlr" if is_pair else "base"
    usual = flatten(load_config(name).to_dict())
    read = {key: value for key, value in flatten(config.to_dict()).items() if key.startswith(("encoder.", "tokens."))}
    if not is_pair:
        read["encoder.layers"] = choice.layers[0]  # the layers above it are left out
    of_pair = {
        "head.mlr.chosen": ",".join(map(str, choice.layers)),
        "pooling": choice.pooling,
        "loss.local_weight": 0,  # which self_contrastive pooling alone has
    }
    return name, {
        "encoder.checkpoint": config.encoder.checkpoint,
        **{key: value for key, value in read.items() if value != usual[key]},
        **(of_pair if is_pair else {}),
        "head.token": choice.token,
        "normalize": choice.normalize,
        **({"loss.temperature": 0.05} if choice.normalize else {}),
    }


def _command(choice: Choice, config: ConfigDict) -> str:
    name, keys = trained_keys(choice, config)
    flags = " ".join(shlex.quote(f"--config.{key}={_as_flag(value)}") for key, value in keys.items())
    return f"  jaxret train --config={name} {flags} --config.data.train=... --workdir=..."


def _as_flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _advice(run: Run, probe: Probe) -> list[str]:
    """Return the weights of the mixture, and the command that trains the best pair of layers."""
    mixture = probe.findings[-1].quality.choice
    weights = {layer: weight for layer, weight in zip(mixture.layers, mixture.weights, strict=True)}
    large = ", ".join(f"layer {layer} {weight:.2f}" for layer, weight in weights.items() if weight >= SHOWN_WEIGHT)
    pair = max((one for one in probe.pairs if one.choice.token in TOKENS), key=Quality.mean)
    layers = [one for one in probe.alone if one.choice.layers[0] and one.choice.token in TOKENS]
    single, choice = max(layers, key=Quality.mean), pair.choice
    pairs = [result for result in probe.findings if len(result.quality.choice.layers) == 2]
    gain = max(pairs, key=lambda result: result.comparison.difference if result.comparison else 0.0)
    score = "maximum" if choice.pooling == "none" else choice.pooling
    step = run.checkpoint["step"]
    return [
        f"weights of the mixture: {large}",
        f"These numbers are of the encoder after {step:,} steps of training, which change the layers that it reads."
        if step
        else "These numbers say what the layers contain before training, not what they learn.",
        f"Held out, the last layer with another is {gain.comparison.difference:+.4f} against it alone "
        f"(p {format_p_value(gain.p_value)}), and takes {gain.quality.choice.vectors} vector(s)."
        if gain.comparison
        else "",
        f"The best pair on all {len(probe.data.relevance):,} queries ({_describe(choice)}; {score}) is trained by:",
        _command(choice, run.config),
        *_advice_of_one(single, pair, run.config),
    ]


def _advice_of_one(single: Quality, pair: Quality, config: ConfigDict) -> list[str]:
    """Return the command that trains one layer, if that is not worse than the best pair."""
    if single.mean() < pair.mean():
        return []
    return [
        f"One layer is not worse ({_describe(single.choice)}: {single.mean():.4f}, the pair {pair.mean():.4f}), and is "
        "trained by:",
        _command(single.choice, config),
    ]


def probe_picture(results: Mapping[str, Any]) -> Figure:
    """Return a picture of quality over layers: a line for each token, cosines left, dot products right."""
    figure, axes = new_picture(2)
    for ax, normalize in zip(axes, (True, False), strict=True):
        draw_layers(ax, results, normalize)
        ax.set_title("cosines" if normalize else "dot products")
    axes[0].set_ylabel(MEASURE)
    return add_legend(figure, axes[0], most=len(TOKEN_TITLES))


def draw_layers(ax: Axes, results: Mapping[str, Any], normalize: bool) -> None:
    """Draw quality over layers, a line for each token, by cosines (`normalize`) or by dot products."""
    of_scores = [row for row in results["alone"] if row["normalize"] == normalize]
    for number, token in enumerate(dict.fromkeys(row["token"] for row in of_scores)):
        line = [(row["layers"][0], row[MEASURE]) for row in of_scores if row["token"] == token]
        ax.plot(*zip(*line, strict=True), label=TOKEN_TITLES[token], **line_style(number))
    ax.set_xlabel("layer")
    use_whole_numbers(ax)
