"""Every command in docs/coming-from.md runs, on real files of each format and with a tiny encoder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

from tests.pipeline import REPOSITORY, command, environment, write_encoder

TEXT = (REPOSITORY / "docs" / "coming-from.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
# The folders of samples for each section's files, first choice first.
FOLDERS = {
    "DPR": ["dpr"],
    "Tevatron": ["tevatron"],
    "sentence-transformers": ["sentence-transformers", "tevatron"],
    "PyLate": ["pylate", "sentence-transformers"],
    "Pyserini": ["pyserini", "beir/qrels"],
}
SMALL = ["train.batch_size=2", "validation.batch_size=2", "train.epochs=1"]
POSITIONS = "embeddings.position_embeddings.weight"


def write_model(folder: Path) -> None:
    """Write the tiny encoder with positions for the configs' default lengths, and a tokenizer that adds [CLS] and [SEP]
    in every library."""
    write_encoder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith(POSITIONS)]
    tensors[name] = np.tile(tensors[name], (7, 1))[:256]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))


def commands(section: str) -> list[list[str]]:
    """Return the words of each line in the section's shell blocks, after `jaxret`."""
    lines = "\n".join(re.findall(r"^```sh\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)).splitlines()
    argument_lists = [shlex.split(line) for line in lines if line]
    assert {words[0] for words in argument_lists} == {"jaxret"}
    return [words[1:] for words in argument_lists]


def test_every_section_has_samples() -> None:
    assert FOLDERS.keys() == SECTIONS.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("section", FOLDERS)
def test_the_commands_run(section: str, data_dir: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "MODEL")
    for folder in reversed(FOLDERS[section]):
        for file in (data_dir / "format-samples" / folder).iterdir():
            (tmp_path / file.name).unlink(missing_ok=True)
            (tmp_path / file.name).symlink_to(file)
    one_device = environment() | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    for words in commands(section):
        small = [f"--config.{key}" for key in SMALL if words[0] == "train"]
        line = command("-m", "jaxret", *words, *small)
        done = subprocess.run(line, cwd=tmp_path, env=one_device, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (words, done.stderr[-2000:])
