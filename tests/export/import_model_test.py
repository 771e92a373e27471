"""A published model becomes a run: its vectors equal the original's, and it encodes, searches, and starts other
runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

from jaxret.data.formats import Corpus
from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.export.compare_original import compare_with_original, sample_texts
from jaxret.export.import_model import import_model
from jaxret.export.import_options import ImportOptions
from jaxret.index.encoding.encode import encode_corpus
from jaxret.models.heads.head import Side
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, open_run
from jaxret.training.loop import train
from jaxret.types import Ragged
from tests.pipeline import GOLDENS, tiny_config, write_data, write_encoder, write_language_model, write_t5
from tests.sentence_transformers import write_modules

STOCK: dict[str, dict[str, Any]] = {
    "mean": {"normalize": True},
    "cls": {"pooling": {"pooling_mode": "cls"}, "similarity": "dot"},
    "prompts": {"prompts": {"query": "river: ", "passage": "stone: "}, "similarity": "dot"},
}


def test_the_compared_texts_are_real() -> None:
    lengths = [len(text.split()) for text in sample_texts()]
    assert len(lengths) == len(set(sample_texts())) == 64
    assert min(lengths) < 12 < 100 < max(lengths)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "mean" else [pytest.mark.exhaustive]) for name in STOCK]
)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, name: str) -> None:
    """The vectors of encode_query and encode_document are stored: tests/goldens/make_sentence_transformers.py."""
    folder = write_modules(tmp_path / "model", **STOCK[name])
    import_model(str(folder), tmp_path / "run")
    run = open_run(tmp_path / "run")
    stored = np.load(GOLDENS / "sentence_transformers.npz")
    texts = stored["texts"].tolist()
    passages = run.tokenizer.passages([Passage(str(i), text) for i, text in enumerate(texts)])
    sides: dict[Side, Ragged] = {"query": run.tokenizer.queries(texts), "passage": passages}
    for side, tokens in sides.items():
        vectors = run.embedder()(tokens, side).stacked()[:, 0]
        np.testing.assert_allclose(vectors, stored[f"{name}/{side}"], atol=1e-5)
        assert np.abs(vectors - stored[f"{'cls' if name != 'cls' else 'mean'}/{side}"]).max() > 0.1, (
            "control: the other pooling gives other vectors"
        )


@pytest.mark.parametrize("write", [write_encoder, write_t5])
def test_the_tests_encoders_have_the_tokens_of_other_libraries(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """From tokenizer.json alone, transformers puts the same special tokens around a text as jaxret."""
    folder, texts = write(tmp_path / "encoder"), ["river stone", "a1 winter market", ""]
    ours = [row.tolist() for row in TextTokenizer.load(folder, 12, 24).queries(texts)]
    assert ours == [
        encoding.ids for encoding in Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
    ]


@pytest.mark.daily("cls")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("token", "normalize"), [("", None), ("mean", True)], ids=["cls", "mean"])
def test_an_encoder_alone_is_compared_with_torch(tmp_path: Path, token: str, normalize: bool | None) -> None:
    pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    folder = write_encoder(tmp_path / "encoder")
    sentence = import_model(str(folder), tmp_path / "run", ImportOptions(token, normalize=normalize))
    assert "64 texts as queries and as passages: the largest difference from transformers is " in sentence
    assert float(sentence.split()[-1]) < 1e-5
    run = open_run(tmp_path / "run")
    assert (run.config.head.token, run.config.normalize) == (token or "cls", bool(normalize))

    tensors = load_file(folder / "model.safetensors")  # control: the original becomes another model
    tensors["encoder.layer.1.output.dense.bias"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"this is another model"):
        compare_with_original(run, folder)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))  # without a template, transformers adds no [CLS]
    tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"their tokenizer makes .* post_processor in tokenizer.json"):
        compare_with_original(run, folder)


@pytest.mark.exhaustive
def test_a_t5_encoder_alone_is_compared_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    sentence = import_model(str(write_t5(tmp_path / "t5")), tmp_path / "run", ImportOptions("mean"))
    assert float(sentence.split()[-1]) < 1e-5


@pytest.mark.exhaustive
def test_a_model_that_differs_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_modules(tmp_path / "model")

    def differs(run: Run, directory: Path) -> str:
        raise ValueError("this is another model")

    with monkeypatch.context() as patch:
        patch.setattr("jaxret.export.import_model.compare_with_original", differs)
        with pytest.raises(ValueError, match=r"this is another model"):
            import_model(str(folder), tmp_path / "run")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    monkeypatch.setattr("jaxret.export.import_model.compare_with_original", lambda run, directory: "compared")
    sentences = [import_model(str(folder), tmp_path / "run").splitlines()[-1] for _ in range(2)]
    assert sentences == ["compared", "compared"]  # the second call opens the existing run
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FileExistsError, match=r"other exists already"):
        import_model(str(folder), tmp_path / "other")


@pytest.mark.slow
def test_without_torch_a_message_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = write_modules(tmp_path / "model")
    sentences = import_model(str(folder), tmp_path / "run").splitlines()
    assert sentences[-1].startswith("not compared with the original: ")


@pytest.mark.slow
def test_the_first_passage_is_shown_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxret.export.import_model.compare_with_original", lambda run, directory: "")
    corpus, folder = tmp_path / "corpus.jsonl", str(write_modules(tmp_path / "model"))
    corpus.write_text(json.dumps({"_id": "p1", "title": "Stone", "text": "river " * 40}) + "\n")
    text = import_model(folder, tmp_path / "run", corpus=Corpus.open(corpus))
    assert text.startswith(f"the first passage, 'p1', is read as 'Stone {('river ' * 40)[:60]}...' (tokens.title_sep")
    corpus.write_text("")
    with pytest.raises(ValueError, match=r"corpus\.jsonl"):
        import_model(folder, tmp_path / "other", corpus=Corpus.open(corpus))
    assert not (tmp_path / "other").exists()


@pytest.mark.table
@pytest.mark.parametrize(
    ("write", "separator", "expected"),
    [
        (write_modules, "auto", " "),
        (write_modules, "[SEP]", "[SEP]"),
        (write_modules, " - ", " - "),
        (write_encoder, "auto", "[SEP]"),
        (write_encoder, " ", " "),
    ],
)
def test_the_title_separator_follows_the_directory_or_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], separator: str, expected: str
) -> None:
    monkeypatch.setattr("jaxret.export.import_model.compare_with_original", lambda run, directory: "")
    sentence = import_model(str(write(tmp_path / "model")), tmp_path / "run", ImportOptions(title_separator=separator))
    shown = " [SEP] " if expected == "[SEP]" else expected
    assert sentence.startswith(f"a passage with a title is read as 'TITLE{shown}TEXT' (tokens.title_separator=")
    run = open_run(tmp_path / "run")
    assert run.config.tokens.title_separator == run.contract["title_separator"] == expected
    if expected != "[SEP]":
        joined, apart = [Passage("1", f"river{expected}stone")], [Passage("1", "stone", "river")]
        assert run.tokenizer.passages(apart)[0].tolist() == run.tokenizer.passages(joined)[0].tolist()


@pytest.mark.exhaustive
def test_an_opened_model_encodes_searches_and_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = write_modules(tmp_path / "model"), write_data(tmp_path / "data")
    monkeypatch.setattr("jaxret.export.import_model.compare_with_original", lambda run, directory: "")
    import_model(str(folder), tmp_path / "run")

    run = open_run(tmp_path / "run")
    assert run.config.encoder.tied
    assert run.config.normalize
    assert run.config.head.token == "mean"
    assert (run.tokenizer.query_length, run.tokenizer.passage_length) == (16, 16)
    encode_corpus(run, Corpus.open(data), progress=False)
    assert (
        search_files(run, EvaluationSource.open(data, data), EvaluationOptions(k=5, measures=("RR@5",)), progress=False)
        is not None
    )

    started = {"train__start_from": str(tmp_path / "run"), "train__steps": 0, "data__dev": ""}
    lengths = {"tokens__query_length": 16, "tokens__passage_length": 16}
    train(tiny_config(folder, data, **started, **lengths), tmp_path / "tuned", progress=False)
    assert open_run(tmp_path / "tuned").checkpoint["digest"] == run.checkpoint["digest"]
    with pytest.raises(ContractError, match=r"query_length: 16 in .*, 12 in this run"):
        train(tiny_config(folder, data, **started, **lengths | {"tokens__query_length": 12}), tmp_path / "o", False)


@pytest.mark.slow
def test_a_run_keeps_the_settings_of_its_directory(tmp_path: Path) -> None:
    """A run can continue when its model's directory is gone; stated.json is sealed like all other files."""
    folder = write_modules(tmp_path / "model")
    none = {"train__steps": 0, "data__dev": "", "tokens__query_length": 256, "tokens__passage_length": 256}
    config = tiny_config(folder, "", **none)
    train(config, tmp_path / "run", progress=False)
    folder.rename(tmp_path / "elsewhere")
    train(config, tmp_path / "run", progress=False)
    run = open_run(tmp_path / "run")
    assert (run.config.head.token, run.config.normalize, run.tokenizer.query_length) == ("mean", True, 16)
    path = tmp_path / "run" / "encoder" / "stated.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalize": False}))
    with pytest.raises(ContractError, match=r"stated.json is damaged or was edited"):
        train(config, tmp_path / "run", progress=False)


@pytest.mark.slow
def test_an_encoder_without_cls_has_another_token(tmp_path: Path) -> None:
    """T5 uses the mean, and a causal language model its last token; [CLS] is refused."""
    with pytest.raises(ValueError, match=r"set head.token='mean'"):
        import_model(str(write_t5(tmp_path / "t5")), tmp_path / "refused", ImportOptions("cls"))
    import_model(str(tmp_path / "t5"), tmp_path / "t5-run")
    import_model(str(write_language_model(tmp_path / "qwen3")), tmp_path / "qwen3-run")
    assert [open_run(tmp_path / f"{name}-run").config.head.token for name in ("t5", "qwen3")] == ["mean", "last"]


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text("{}\n")
    with pytest.raises(FileNotFoundError, match=r"data has no config.json \(it has corpus.jsonl\); a Hugging Face"):
        import_model(str(tmp_path / "data"), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"encoder.download=True \(of jaxret open: --download\) fetches it"):
        import_model("nobody/knows", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_token_flag_that_contradicts_the_modules(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head.token is 'cls' in the config and 'mean'"):
        import_model(str(write_modules(tmp_path / "model")), tmp_path / "run", ImportOptions(token="cls"))
