"""The configs of the repository, for commands that need no --config."""

from __future__ import annotations

import importlib

from ml_collections import ConfigDict


def shipped_config(name: str, *suffix: str) -> ConfigDict:
    """configs/NAME.py, locked: an unknown key is an error. Raises FileNotFoundError outside the repository's folder."""
    try:
        config = importlib.import_module(f"configs.{name}").get_config(*suffix)
    except ModuleNotFoundError as error:
        raise FileNotFoundError(f"configs/{name}.py is not here: run this in the folder of the repository") from error
    return config.lock()
