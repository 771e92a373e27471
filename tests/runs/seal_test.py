"""A run's files are accepted only as the run wrote them."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxret.runs import seal
from jaxret.runs.mismatch import ContractError
from jaxret.runs.seal import check_seal, write_sealed
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, write_json

CONFIG = {"optimizer": {"learning_rate": 0.001}, "tokens": {"query_length": 12}}


SEALED = ["config.json", "contract.json", "data.json", "env.json", "encoder/tokenizer.json", "seal.json"]


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    folder = Workdir(tmp_path)
    folder.encoder.mkdir()
    (folder.encoder / "config.json").write_text('{"layer_norm_eps": 1e-12}')
    (folder.encoder / "tokenizer.json").write_text('{"vocab": ["a", "b"]}')
    values = {folder.contract: {"version": 2}, folder.data: {}, folder.environment: {"python": "3"}}
    write_sealed(folder, {folder.history: '{"step": 1}\n', **values, folder.config: CONFIG})
    return folder


def test_unchanged_files_are_accepted(workdir: Workdir) -> None:
    check_seal(workdir)
    workdir.config.write_text(json.dumps(CONFIG))  # the JSON has the same content and another layout
    (workdir.encoder / ".tokenizer.json.0123456789abcdef.tmp").touch()
    (workdir.path / "metrics.jsonl").touch()
    check_seal(workdir)


def complaint(workdir: Workdir) -> str:
    try:
        check_seal(workdir)
    except ContractError as error:
        return str(error)
    return ""


@pytest.mark.table
@pytest.mark.parametrize("name", SEALED)
def test_every_flipped_bit_is_detected_or_has_no_effect(name: str, workdir: Workdir) -> None:
    path = workdir / name
    whole, before = path.read_bytes(), read_json(path)
    seen = 0
    for place in range(0, 8 * len(whole), 7):
        path.write_bytes(whole[: place // 8] + bytes([whole[place // 8] ^ 1 << place % 8]) + whole[place // 8 + 1 :])
        message = complaint(workdir)
        if message:
            seen += 1
            assert message.startswith(f"{path} is damaged or was edited; restore it; or, if you meant the change")
        else:
            assert read_json(path) == before
            assert not name.startswith("encoder")
    assert seen > len(whole) / 2
    path.write_bytes(whole)
    check_seal(workdir)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {**CONFIG, "pooling": "none"}, r"config\.json is damaged or was edited"),
        ("config.json", None, r"config\.json is missing"),
        ("data.json", None, r"data\.json is missing"),
        ("env.json", {"python": "4"}, r"env\.json is damaged or was edited"),
        ("history.jsonl", {"step": 2}, r"history\.jsonl is damaged or was edited"),
        ("history.jsonl", None, r"history\.jsonl is missing"),
        ("encoder/tokenizer.json", None, r"tokenizer\.json is missing"),
        ("encoder/special_tokens_map.json", {}, r"special_tokens_map\.json .*file .*remove"),
        ("seal.json", {}, r"seal\.json is damaged or was edited"),
        ("seal.json", [], r"seal\.json is damaged or was edited"),
    ],
)
def test_an_edit_names_the_file(name: str, content: Any, message: str, workdir: Workdir) -> None:
    if content is None:
        (workdir / name).unlink()
    else:
        write_json(workdir / name, content)
    with pytest.raises(ContractError, match=message):
        check_seal(workdir)


def test_an_edit_is_accepted_by_deleting_the_seal(workdir: Workdir, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(workdir.config, {**CONFIG, "pooling": "none"})
    workdir.seal.unlink()
    check_seal(workdir)
    said = capsys.readouterr().err
    assert said == f"{workdir.seal} was deleted; the files of the run are accepted unchanged\n"


def test_a_file_that_is_written_while_it_is_read_is_not_damaged(
    workdir: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has an old seal, because a resumed job wrote seal and env.json after that."""
    digest = seal._digest
    written: list[bool] = []

    def late(*args: Any) -> str:
        if not written:
            written.append(True)
            write_sealed(workdir, {workdir.environment: {"python": "4"}})
        return digest(*args)

    monkeypatch.setattr(seal, "_digest", late)
    check_seal(workdir)
    assert written


@contextlib.contextmanager
def killed(written: int) -> Iterator[None]:
    """Interrupt a job after it has written this many JSON files."""
    write, calls = seal.write_json, itertools.count()

    def dying(path: Path, value: Any) -> None:
        if next(calls) == written:
            raise KeyboardInterrupt
        write(path, value)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(seal, "write_json", dying)
        yield


def test_a_folder_is_valid_after_a_kill_at_any_write(workdir: Workdir) -> None:
    for kept in range(5):  # the seal, two files, the seal again
        with killed(kept):
            write_sealed(workdir, {workdir.contract: {"version": kept}, workdir.config: {**CONFIG, "kept": kept}})
        assert (read_json(workdir.config).get("kept") == kept) == (kept > 2)
        check_seal(workdir)
    write_json(workdir.config, CONFIG)
    with pytest.raises(ContractError, match=r"config\.json"):  # only the content of the last write is sealed
        check_seal(workdir)


@pytest.mark.parametrize("kept", range(5))
def test_a_folder_is_valid_after_a_kill_before_the_first_write(kept: int, tmp_path: Path) -> None:
    """For example, a run's first env.json, which the seal names before it is written."""
    workdir = Workdir(tmp_path)
    write_sealed(workdir, {workdir.contract: {"version": 2}, workdir.config: CONFIG})
    values = {workdir.environment: {"python": "4"}, workdir.data: {}}
    with killed(kept):
        write_sealed(workdir, values)
    assert workdir.environment.exists() == (kept > 1)
    check_seal(workdir)
    write_sealed(workdir, values)
    check_seal(workdir)
    workdir.environment.unlink()
    with pytest.raises(ContractError, match=r"env\.json is missing"):  # once written, the file may not be missing
        check_seal(workdir)
