"""Exports to PEFT (--to=peft): the adapters of a run that was trained with LoRA, without its base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax

from jaxret.export.exported import CONFIG, HEAD, write_head
from jaxret.export.round_trip import SIDES, check_vectors, run_vectors
from jaxret.export.targets.stock_modules import write_tokenizer
from jaxret.models.heads.head import Side
from jaxret.models.lora import make_adapters, merge_adapters
from jaxret.models.partition import join_parameters
from jaxret.models.peft_files import load_adapters, save_adapters
from jaxret.runs.run import Run, base_encoders, trained_parameters
from jaxret.storage.atomic import read_json


def write_peft(run: Run, out: Path) -> list[str]:
    """Write the adapters, or the adapters of each side in a separate folder, with head and config. Compare the
    vectors of the base with these adapters. Raises ValueError for a run without adapters."""
    settings, shapes = run.config.lora, run.model.module.config
    adapters = make_adapters(settings, shapes)
    if adapters is None:
        raise ValueError(
            f"--to=peft: {run.workdir} was trained without adapters (lora.rank is 0); --to=hf exports the full encoder"
        )
    tensors, base = trained_parameters(run), base_encoders(run)
    source = run.config.train.start_from or run.config.encoder.checkpoint
    tied = run.config.encoder.tied
    names: dict[Side, str] = {"passage": "encoder"} if tied else {side: f"{side}_encoder" for side in SIDES}
    folders = {side: out if tied else out / side for side in names}
    for side, name in names.items():
        save_adapters(folders[side], shapes, tensors[name], settings, source)
        write_tokenizer(run, side, folders[side])
    head_names = write_head(run, out, base=True)
    read_back = {name: load_adapters(folders[side], shapes, settings) for side, name in names.items()}
    remaining_params = {name: part for name, part in jax.device_get(run.params).items() if name not in names.values()}
    params = {**remaining_params, **merge_adapters(join_parameters(base, read_back), adapters.scaling)}
    params = jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), params, run.params)
    merged_run = replace(run, params=params)
    values = "vectors of the base with these adapters"
    sentence = check_vectors(run, lambda side, tokens: run_vectors(merged_run, side, tokens), values)
    parameters = f"its parameters ({', '.join(head_names)}) are in {HEAD}" if head_names else "it has no parameters"
    notes = [
        sentence,
        f"PEFT's files do not describe head {run.config.head.name!r}: {parameters}, its settings in {CONFIG}.",
    ]
    if run.config.encoder.layers:
        notes.append(
            f"The adapters are for the first layers of the base: load it with num_hidden_layers={shapes.num_layers}."
        )
    if run.config.encoder.direction:
        notes.append(f"The run's attention is {run.config.encoder.direction}, which PEFT's files do not say.")
    if run.config.train.start_from:
        step = read_json(run.workdir.data)["start"]["step"]
        notes.append(f"The base is checkpoint {step} of the run {source}: --to=hf --checkpoint={step} exports it.")
    if settings.base_dtype != "float32":
        notes.append(
            f"The run keeps the kernels and tables of the base in {settings.base_dtype}: the code above rounds them."
        )
    return notes
