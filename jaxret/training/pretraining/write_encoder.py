"""Write the result of pre-training as a Hugging Face directory, from which fine-tuning begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jaxret.models.encoders.architectures import ARCHITECTURES
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained
from jaxret.models.pretraining import PRETRAINING_HEAD
from jaxret.runs.run import OpenedRun
from jaxret.storage.atomic import atomic_write, read_json, write_json
from jaxret.storage.foreign_files import write_tensors
from jaxret.training.pretraining.scratch import copy_tokenizer


def write_pretrained_encoder(run: OpenedRun[Any], folder: Path, command: str) -> list[str]:
    """Write a pre-trained encoder into an empty folder, and return sentences about its files.

    The files are config.json and model.safetensors of transformers' BertForMaskedLM (or a similar model), the
    tokenizer, the head of pre-training and a model card. Raises ValueError if the weights differ when they are read
    back.
    """
    shapes, params, step = run.model.module.config, jax.device_get(run.params), run.checkpoint["step"]
    save_pretrained(folder, shapes, params["encoder"])
    copy_tokenizer(run.workdir.encoder, folder)
    settings = folder / "tokenizer_config.json"
    write_json(settings, (read_json(settings) if settings.is_file() else {}) | {"model_max_length": shapes.longest})
    _, back = load_pretrained(folder, (), shapes)
    if not jax.tree.all(jax.tree.map(np.array_equal, back, params["encoder"])):
        raise ValueError(f"{folder}/model.safetensors has other values than were written; check the disk")
    notes = [f"{ARCHITECTURES[shapes.model_type].mlm_class} after {step} steps of {run.config.pretraining.method}"]
    if head := params.get("head"):
        flat = traverse_util.flatten_dict(head, sep="/")
        write_tensors(folder / PRETRAINING_HEAD, flat, {"head": run.model.module.method.head})
        notes.append(
            f"the head of pre-training ({len(flat)} tensors) is in {PRETRAINING_HEAD}. Further pre-training with the "
            "same method continues with it; no other command reads it"
        )
    _write_card(run, folder, command)
    return notes


def _write_card(run: OpenedRun[Any], folder: Path, command: str) -> None:
    config, corpus = run.config, read_json(run.workdir.data)["train"]
    settings = {f"pretraining.{key}": value for key, value in config.pretraining.to_dict().items() if key != "scratch"}
    settings |= {f"{group}.{key}": config[group][key] for group, key in _CARD_KEYS}
    keys = "".join(f"| `{key}` | {value!r} |\n" for key, value in settings.items())
    lines = [
        "---\nlibrary_name: transformers\npipeline_tag: fill-mask\ntags: [jaxret, pre-training, retrieval]\n---\n",
        f"# {run.workdir.name}\n",
        f"An encoder pre-trained for retrieval ({config.pretraining.method}) with jaxret, {run.checkpoint['step']} "
        f"steps, from `{config.encoder.checkpoint}`. Fine-tune it before use: its vectors are poor without that.\n",
        "```\njaxret train --config=NAME --config.encoder.checkpoint=FOLDER ...\n```\n",
        f"## Data\n\n{config.data.train}: {corpus['documents']:,} documents, SHA-256 {corpus['sha256']}.\n",
        f"## Settings\n\n| key | |\n|:--|:--|\n{keys}",
        f"## Command\n\n```\n{command}\n```\n",
    ]
    with atomic_write(folder / "README.md") as file:
        file.write("\n".join(lines))


# (group, key) of the settings on the card, in addition to the group `pretraining`.
_CARD_KEYS = (
    ("train", "batch_size"),
    ("optimizer", "name"),
    ("optimizer", "learning_rate"),
    ("optimizer", "warmup_fraction"),
    ("optimizer", "weight_decay"),
    ("optimizer", "clip_norm"),
    ("encoder", "dtype"),
)
