"""The README.md of an exported model: use, texts, training data, measures, commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxret.models.heads import pylate
from jaxret.runs.run import Run
from jaxret.storage.atomic import atomic_write, read_json

_HEADER = {  # library -> (library_name, pipeline_tag, tags)
    "hf": ("transformers", "feature-extraction", ("feature-extraction", "sentence-similarity", "dense")),
    "sentence-transformers": (
        "sentence-transformers",
        "sentence-similarity",
        ("sentence-transformers", "sentence-similarity", "feature-extraction", "dense"),
    ),
    "onnx": ("onnx", "feature-extraction", ("onnx", "feature-extraction", "sentence-similarity", "dense")),
    "pylate": (
        "PyLate",
        "sentence-similarity",
        ("PyLate", "sentence-transformers", "sentence-similarity", "feature-extraction"),
    ),
    "peft": ("peft", "feature-extraction", ("peft", "lora", "feature-extraction", "sentence-similarity", "dense")),
    "pyserini": ("pyserini", "feature-extraction", ("pyserini", "faiss", "feature-extraction", "dense")),
    "anserini": ("pyserini", "feature-extraction", ("pyserini", "anserini", "splade", "sparse")),
}
_USE = {
    "hf": """from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")

from jaxret.export.exported import read_export  # with the head
retriever = read_export("FOLDER")
queries, passages = retriever.queries([...]), retriever.passages([...])""",
    "sentence-transformers": """from sentence_transformers import SentenceTransformer
model = SentenceTransformer("FOLDER")
queries, passages = model.encode_query([...]), model.encode_document([...])""",
    "onnx": """import numpy as np, onnxruntime, tokenizers
tokenizer = tokenizers.Tokenizer.from_file("FOLDER/tokenizer.json")
tokenizer.enable_truncation(LENGTH)
tokenizer.enable_padding()
texts = tokenizer.encode_batch([...])
session = onnxruntime.InferenceSession("FOLDER/model.onnx")  # or query.onnx and passage.onnx
ids, mask = ([getattr(t, name) for t in texts] for name in ("ids", "attention_mask"))
outputs = session.run(None, {"input_ids": np.array(ids), "attention_mask": np.array(mask)})""",
    "pylate": pylate.USE,
    "peft": """from peft import PeftModel
from transformers import AutoModel
base = AutoModel.from_pretrained("BASE", dtype="float32")
ROUNDING
model = PeftModel.from_pretrained(base, "FOLDER")""",
    "pyserini": """# python -m pyserini.search.faiss --index FOLDER --encoder FOLDER/query-encoder \\
#     --encoder-class auto --pooling POOLING NORM --topics TOPICS.tsv --output run.trec""",
    "anserini": """# python -m pyserini.index.lucene --collection JsonVectorCollection --input FOLDER/corpus \\
#     --index INDEX --generator DefaultLuceneDocumentGenerator --impact --pretokenized
# python -m pyserini.search.lucene --index INDEX --topics FOLDER/topics.tsv --output run.trec \\
#     --impact --pretokenized""",
}


_ROUNDING = {  # lora.base_dtype -> code that rounds kernels and tables to it
    "bfloat16": """for parameter in base.parameters():
    if parameter.ndim > 1:
        parameter.data = parameter.data.bfloat16().float()
""",
}


def write_card(run: Run, kind: str, name: str, out: Path, notes: list[str]) -> None:
    """Write README.md of an export.

    Args:
        kind: the library, one of `export.EXPORT_KINDS`.
        name: name of the exported model.
        out: folder of the export.
        notes: sentences on how the files differ from the run.
    """
    config, tokens, measures = run.config, run.config.tokens, _measures(run)
    measure_texts = [(set, ", ".join(f"{name} {value:.4f}" for name, value in mean.items())) for set, mean in measures]
    lengths = f"| tokens at most | {tokens.query_length} | {tokens.passage_length} |\n"
    prompts = f"| text in front | `{run.tokenizer.prompt('query')!r}` | `{run.tokenizer.prompt('passage')!r}` |\n"
    export = f"jaxret export --workdir={run.workdir} --to={kind} --out={name}"
    steps = run.checkpoint["step"]
    training = f"Trained on {config.data.train}, {steps} steps" if steps else "Not trained further"
    lines = [
        f"---\n{_header(kind, name, measures)}---\n\n# {name}\n",
        f"A passage retriever (head `{config.head.name}`, pooling `{config.pooling}`), made by jaxret from "
        f"`{config.encoder.checkpoint}`: checkpoint {run.checkpoint['step']} of the run `{run.workdir.name}`.\n",
        f"```python\n{_use(run, kind, name)}\n```\n",
        "## Texts\n",
        f"| | query | passage |\n|:--|:--|:--|\n{lengths}{prompts}",
        f"{_vector_sentence(run)}\n",
        "".join(f"- {note}\n" for note in notes),
        f"## Data\n\n{training}.\n",
        "## Measures\n\n" + ("".join(f"- {set}: {text}\n" for set, text in measure_texts) or "No evaluation.\n"),
        f"## Commands\n\n```\n{export}\n```\n",
    ]
    with atomic_write(out / "README.md") as file:
        file.write("\n".join(lines))


_TOKENS = {
    "cls": "state of its first token",
    "mean": "mean over the states of its tokens",
    "last": "state of its last token",
    "mean_without_first": "mean over the states of its tokens without the first",
}


def _vector_sentence(run: Run) -> str:
    """Return a sentence on the vectors of a text and on the score of a passage."""
    config, head, length = run.config, run.model.module.head, ", of length 1" if run.config.normalize else ""
    if run.model.late_interaction:
        tokens = f"Every token has a vector{length}"
        return f"{tokens}; the score of a passage is the sum over a query's vectors of the largest dot product."
    if run.model.vectors_per_passage != 1:
        return f"A passage has several vectors{length}; its score is the largest dot product with the query's."
    if not head.layers_of("passage"):
        return f"Head `{config.head.name}` computes the vector of a text{length}; scores are dot products."
    token = _TOKENS[head.token_of("passage", config.pooling)]
    return f"The vector of a text is the {token}{length}; the score of a passage is the dot product."


def _use(run: Run, kind: str, name: str) -> str:
    tokens, mean = run.config.tokens, run.config.head.token == "mean"
    words = {
        "FOLDER": name,
        "LENGTH": str(max(tokens.query_length, tokens.passage_length)),
        "POOLING": "mean" if mean else "cls",
        "NORM": "--l2-norm" if run.config.normalize else "",
        "BASE": run.config.encoder.checkpoint,
        "ROUNDING\n": _ROUNDING.get(run.config.lora.base_dtype, ""),
    }
    return re.sub("|".join(words), lambda match: words[match[0]], _USE[kind])


def _header(kind: str, name: str, measures: list[tuple[str, dict[str, float]]]) -> str:
    """Return the metadata of the card in YAML. Values are JSON, which is a subset of YAML."""
    library, task, tags = _HEADER[kind]
    values: dict[str, Any] = {"library_name": library, "pipeline_tag": task, "tags": [*tags, "jaxret"]}
    if measures:
        results = [
            {
                "task": {"type": "information-retrieval"},
                "dataset": {"type": set, "name": set},
                "metrics": [{"type": measure, "value": value} for measure, value in mean.items()],
            }
            for set, mean in measures
        ]
        values["model-index"] = [{"name": name, "results": results}]
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return "".join(f"{key}: {text}\n" for key, text in texts.items())


def _measures(run: Run) -> list[tuple[str, dict[str, float]]]:
    """Return (data set, mean measures) of each evaluation of this checkpoint by an exact search for all passages with
    vectors of full size."""
    results = [(path.stem, read_json(path)) for path in run.workdir.evaluations]
    return [
        (name, values["mean"])
        for name, values in results
        if values["provenance"]["checkpoint"] == run.checkpoint and _is_of_model(values["provenance"]["search"])
    ]


def _is_of_model(search: Mapping[str, Any]) -> bool:
    """Return whether the measures of a search depend only on the model, not on an index, a filter or a dimension."""
    return bool(search.get("exact")) and not any(search.get(key) for key in ("filter", "max_passage", "dimension"))
