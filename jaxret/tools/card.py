"""The README.md of an exported model: what it was trained on, how texts are given, measures, commands."""

from __future__ import annotations

from pathlib import Path

from jaxret.runs.run import Run
from jaxret.storage import atomic_write, read_json

_HEADER = {
    "hf": ("transformers", "feature-extraction"),
    "sentence-transformers": ("sentence-transformers", "sentence-similarity"),
}
_USE = {
    "hf": """from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")""",
    "sentence-transformers": """from sentence_transformers import SentenceTransformer
model = SentenceTransformer("FOLDER")
queries, passages = model.encode_query([...]), model.encode_document([...])""",
}


def write_card(run: Run, kind: str, out: Path, notes: list[str]) -> None:
    """Writes README.md; `notes` are sentences on how exact the files are and what they lack."""
    library, task = _HEADER[kind]
    config, tokens = run.config, run.config.tokens
    tags = "".join(f"- {tag}\n" for tag in dict.fromkeys(("sentence-transformers", task, "dense", "jaxret")))
    use = _USE[kind].replace("FOLDER", out.name)
    lines = [
        f"---\nlibrary_name: {library}\npipeline_tag: {task}\ntags:\n{tags}---\n\n# {out.name}\n",
        f"A passage retriever (head `{config.head.name}`, pooling `{config.pooling}`), made by jaxret from "
        f"`{config.encoder.checkpoint}`: checkpoint {run.checkpoint['step']} of the run `{run.workdir.name}`.\n",
        f"```python\n{use}\n```\n",
        "## Texts\n",
        "| | query | passage |\n|:--|:--|:--|\n"
        f"| tokens at most | {tokens.query_length} | {tokens.passage_length} |\n"
        f"| text in front | `{tokens.query_prompt!r}` | `{tokens.passage_prompt!r}` |\n",
        f"The vector of a text is of its {'mean over tokens' if config.head.token == 'mean' else 'first token'}"
        f"{', of length 1' if config.normalize else ''}; the score of a passage is the dot product.\n",
        "".join(f"- {note}\n" for note in notes),
        f"## Data\n\nTrained on {config.data.train or 'nothing further'}, {run.checkpoint['step']} steps.\n",
        "## Measures\n\n" + (_measures(run) or "None were taken.\n"),
    ]
    with atomic_write(out / "README.md") as file:
        file.write("\n".join(lines))


def _measures(run: Run) -> str:
    """A line for each data set that was searched with this checkpoint."""
    found = []
    for path in sorted((run.workdir / "eval").glob("*.json")):
        stored = read_json(path)
        if stored["provenance"]["checkpoint"] == run.checkpoint:
            values = ", ".join(f"{name} {value:.4f}" for name, value in stored["mean"].items())
            found.append(f"- {path.stem}: {values}\n")
    return "".join(found)
