"""Exports of language models whose tokenizer.json appends nothing to a text, for other libraries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxret.export.export import export
from jaxret.export.import_model import import_model
from jaxret.export.import_options import ImportOptions
from jaxret.runs.run import Run, open_run
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import untrained_run, write_data, write_language_model

pytestmark = pytest.mark.slow
TEXTS = ["river stone music", "garden", "paper light forest winter market"]


def their_vectors(folder: Path, token: str = "last") -> np.ndarray:
    """Return the vectors of TEXTS, computed with transformers."""
    torch = pytest.importorskip("torch", reason="PyTorch is what the export is compared with")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = transformers.AutoModel.from_pretrained(str(folder), local_files_only=True, dtype="float32").eval()
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in TEXTS]
    return np.stack([own[-1] if token == "last" else own.mean(0) for own in states])


def our_vectors(run: Run) -> np.ndarray:
    return run.embedder()(run.tokenizer.queries(TEXTS), "query").flat


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3", "tiny_mistral"])
@pytest.mark.parametrize("template", ["<|begin|> $A", "$A"])
def test_an_export_appends_the_end_token_of_the_run(name: str, template: str, tmp_path: Path) -> None:
    encoder = write_language_model(tmp_path / "model", name, template)
    if name == "tiny_llama":  # the class of its tokenizer makes a post-processor from these settings
        settings = read_json(encoder / "tokenizer_config.json") | {"add_bos_token": True, "add_eos_token": False}
        write_json(encoder / "tokenizer_config.json", settings)
    run = untrained_run(
        tmp_path / "run",
        encoder,
        write_data(tmp_path / "data"),
        head__token="last",
        tokens__query_length=40,
        tokens__passage_length=40,
    )
    assert run.tokenizer.queries(["river"]).flat[-1] == 1, "the end token is eos_token"
    for kind, folder in (("hf", "hf"), ("sentence-transformers", "st")):
        export(tmp_path / "run", kind, tmp_path / folder)
    theirs = their_vectors(tmp_path / "hf")
    np.testing.assert_allclose(our_vectors(run), theirs, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(their_vectors(tmp_path / "st"), theirs, rtol=1e-5, atol=1e-6)
    import_model(str(tmp_path / "st"), tmp_path / "again")
    np.testing.assert_allclose(our_vectors(open_run(tmp_path / "again")), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("template", ["<|begin|> $A", "$A", "$A <|end|>"])
@pytest.mark.parametrize("token", ["last", "mean"])
def test_a_model_is_opened_with_its_own_tokens(template: str, token: str, tmp_path: Path) -> None:
    encoder = write_language_model(tmp_path / "model", "tiny_llama", template)
    text = import_model(str(encoder), tmp_path / "run", ImportOptions(token))
    start = "'<|begin|>' (id 2)" if "begin" in template else "nothing"
    end = "'<|end|>' (id 0)" if "end" in template else "nothing"
    assert f"around every text: {start} and {end}" in text
    np.testing.assert_allclose(
        our_vectors(open_run(tmp_path / "run")), their_vectors(encoder, token), rtol=1e-4, atol=2e-5
    )
