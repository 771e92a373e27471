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
from jaxret.experiments.config_values import flag_text
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
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.vector_diversity import JudgedSource, has_several_vectors, report_diversity
from jaxret.models.heads.head import TOKENS
from jaxret.parallel.events import emit
from jaxret.runs.mismatch import flatten
from jaxret.runs.run import Run
from jaxret.storage.atomic import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROBE_MEASURE = f"nDCG@{NDCG}"
SHOWN_WEIGHT = 0.005  # smaller weights of a mixture are not printed, because they round to 0.00


def report_probe(run: Run, source: EvaluationSource, corpus: Corpus, options: ProbeOptions) -> str:
    """Probe the layers of a run's encoder, write `eval/DATA.SPLIT.probe.json` and a picture, and return the text to
    print.

    Args:
        run: the run whose encoder is probed.
        source: queries and judgements.
        corpus: the corpus of the judged passages.
        options: numbers of queries and passages, and the seed.
    """
    probe = probe_layers(run, source, corpus, options)
    path = probe.path
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
        *_winner_lines(run, JudgedSource.of(source, corpus), options.name),
    ]
    return "\n".join(lines)


def _winner_lines(run: Run, data: JudgedSource, name: str) -> list[str]:
    """Return lines on how often each vector of a passage wins; [] unless the run is trained and has several vectors."""
    if not run.checkpoint["step"] or not has_several_vectors(run.model):
        return []
    try:
        report = report_diversity(run, data, name)
    except ValueError as error:  # diversity needs every relevant passage in the corpus; a probe does not
        report = f"not measured: {error}"
    return ["", "Which vector of a relevant passage wins (jaxret diversity):", "", report]


def probe_json(probe: Probe, corpus_size: int) -> dict[str, Any]:
    """Return all measurements, and the storage of each choice for a corpus of `corpus_size` passages."""

    def storage(quality: Quality) -> dict[str, int]:
        passage_bytes = probe.data.stored_bytes(quality.choice)
        return {"bytes_per_passage": passage_bytes, "corpus_bytes": corpus_size * passage_bytes}

    return {
        "dataset": probe.dataset,
        "queries": len(probe.data.relevance),
        "held_out": len(probe.held_out),
        "passages": probe.data.relevance.shape[1],
        "corpus_size": corpus_size,
        "alone": [_quality_json(quality) | storage(quality) for quality in probe.single_layers],
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
        PROBE_MEASURE: round(quality.mean(), 4),
        f"R@{RECALL}": round(float(quality.recall.mean()), 4),
    }


def _finding_json(result: Finding, probe: Probe) -> dict[str, Any]:
    values = {"name": result.name, **_quality_json(result.quality), "held_out": result.quality.mean(probe.held_out)}
    if comparison := result.comparison:
        interval = {"difference": comparison.difference, "low": comparison.low, "high": comparison.high}
        values |= {**interval, "p": comparison.p_permutation, "p_holm": result.p_value}
    return values


def _layer_tables(probe: Probe) -> list[str]:
    """Return the lines of two tables, for cosines and for dot products: nDCG and recall of every single layer. A *
    marks the best nDCG of a table."""
    lines: list[str] = []
    tokens = probe.data.queries.tokens
    for normalize, scores in ((True, "cosines"), (False, "dot products")):
        members = [quality for quality in probe.single_layers if quality.choice.normalize == normalize]
        qualities = {(quality.choice.layers[0], quality.choice.token): quality for quality in members}
        best = max(quality.mean() for quality in members)
        rows = [[str(layer)] for layer in range(probe.data.last + 1)]
        for (layer, _), quality in sorted(qualities.items(), key=lambda item: tokens.index(item[0][1])):
            mark = "*" if quality.mean() == best else " "
            rows[layer] += [f"{quality.mean():.4f}{mark}", f"{quality.recall.mean():.3f}"]
        header = ["layer", *chain.from_iterable((TOKEN_TITLES[token], f"R@{RECALL}") for token in tokens)]
        title = f"{PROBE_MEASURE} and R@{RECALL} of one layer on both sides, {scores}:"
        lines += ["", title, "", aligned_table(header, rows)]
    return lines


def _finding_table(probe: Probe, corpus_size: int) -> str:
    """Return a table of the findings, measured on the queries that did not choose them."""
    rows = []
    for result in probe.findings:
        quality, comparison = result.quality, result.comparison
        size = probe.data.stored_bytes(quality.choice)
        means = f"{quality.mean(probe.held_out):.4f}", f"{quality.recall[probe.held_out].mean():.4f}"
        test = (comparison.cells[0], format_p_value(result.p_value)) if comparison else ("", "")
        sizes = str(quality.choice.vectors), f"{size:,}", f"{corpus_size * size / 1e9:,.3g} GB"
        rows.append([result.name, _describe_choice(quality.choice), *means, *test, *sizes])
    query_count = len(probe.data.relevance) - len(probe.held_out)
    header = ["", "layers", PROBE_MEASURE, f"R@{RECALL}", "difference", "p (Holm)", "vectors", "bytes"]
    header.append(f"{corpus_size:,}")
    title = f"Chosen on {query_count:,} queries, measured on the other {len(probe.held_out):,}:"
    storage = f"bytes: a passage's vectors in float32; {corpus_size:,}: vectors of this number of passages"
    return f"\n{title}\n\n{aligned_table(header, rows, left=2)}\n{storage}"


def _describe_choice(choice: Choice) -> str:
    layers = f"1 to {choice.layers[-1]}" if choice.pooling == "mix" else ", ".join(map(str, choice.layers))
    return f"{layers}; {TOKEN_TITLES[choice.token]}; {'cosines' if choice.normalize else 'dot products'}"


def trained_keys(choice: Choice, config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """Return the name of a shipped config, and the keys that make it train a probed layer or pair of layers.

    The keys keep the probed run's settings of reading a text (lengths, prompts, depth, direction), from its `config`.
    """
    is_pair = len(choice.layers) == 2
    name = "mlr" if is_pair else "base"
    default_values = flatten(load_config(name).to_dict())
    values = flatten(config.to_dict())
    if not is_pair:
        values["encoder.layers"] = choice.layers[0]  # the encoder ends at this layer
    keys = {"encoder.checkpoint": config.encoder.checkpoint}
    keys |= {
        key: value
        for key, value in values.items()
        if key.startswith(("encoder.", "tokens.")) and value != default_values[key]
    }
    if is_pair:
        keys |= {"head.mlr.chosen": ",".join(map(str, choice.layers)), "pooling": choice.pooling}
        keys["loss.local_weight"] = 0  # only self_contrastive pooling has a local loss
    keys |= {"head.token": choice.token, "normalize": choice.normalize}
    return name, keys | ({"loss.temperature": 0.05} if choice.normalize else {})


def _train_command(choice: Choice, config: ConfigDict) -> str:
    name, keys = trained_keys(choice, config)
    flags = " ".join(shlex.quote(f"--config.{key}={flag_text(value)}") for key, value in keys.items())
    return f"  jaxret train --config={name} {flags} --config.data.train=... --workdir=..."


def _advice(run: Run, probe: Probe) -> list[str]:
    """Return lines with the weights of the mixture, and the command that trains the best pair of layers, or also the
    best single layer if it is not worse."""
    mixture = probe.findings[-1].quality.choice
    weights = zip(mixture.layers, mixture.weights, strict=True)
    large = ", ".join(f"layer {layer} {weight:.2f}" for layer, weight in weights if weight >= SHOWN_WEIGHT)
    pair = max((quality for quality in probe.pairs if quality.choice.token in TOKENS), key=Quality.mean)
    layers = [quality for quality in probe.single_layers if quality.choice.layers[0] and quality.choice.token in TOKENS]
    single, choice = max(layers, key=Quality.mean), pair.choice
    pairs = [result for result in probe.findings if len(result.quality.choice.layers) == 2]
    gain = max(pairs, key=lambda result: result.comparison.difference if result.comparison else 0.0)
    score = "maximum" if choice.pooling == "none" else choice.pooling
    step = run.checkpoint["step"]
    lines = [
        f"weights of the mixture: {large}",
        f"The encoder was trained for {step:,} steps, which change the layers that its head reads."
        if step
        else "The numbers show the layers before training. Training changes them.",
        f"On held-out queries the best pair is {gain.comparison.difference:+.4f} against the last layer alone "
        f"(p {format_p_value(gain.p_value)}), and needs {gain.quality.choice.vectors} vector(s) per passage."
        if gain.comparison
        else "",
        f"The best pair on all {len(probe.data.relevance):,} queries ({_describe_choice(choice)}; {score}) is trained "
        "by:",
        _train_command(choice, run.config),
    ]
    if single.mean() >= pair.mean():
        numbers = f"{_describe_choice(single.choice)}: {single.mean():.4f}, the pair {pair.mean():.4f}"
        lines.append(f"One layer is not worse ({numbers}), and is trained by:")
        lines.append(_train_command(single.choice, run.config))
    return lines


def probe_picture(results: Mapping[str, Any]) -> Figure:
    """Return a picture of quality over layers, with a line for each token. Cosines are left, dot products right."""
    figure, axes = new_picture(2)
    for ax, normalize in zip(axes, (True, False), strict=True):
        draw_layers(ax, results, normalize)
        ax.set_title("cosines" if normalize else "dot products")
    axes[0].set_ylabel(PROBE_MEASURE)
    return add_legend(figure, axes[0], max_columns=len(TOKEN_TITLES))


def draw_layers(ax: Axes, results: Mapping[str, Any], normalize: bool) -> None:
    """Draw quality over layers, a line for each token, by cosines (`normalize`) or by dot products."""
    rows = [row for row in results["alone"] if row["normalize"] == normalize]
    for number, token in enumerate(dict.fromkeys(row["token"] for row in rows)):
        line = [(row["layers"][0], row[PROBE_MEASURE]) for row in rows if row["token"] == token]
        ax.plot(*zip(*line, strict=True), label=TOKEN_TITLES[token], **line_style(number))
    ax.set_xlabel("layer")
    use_whole_numbers(ax)
