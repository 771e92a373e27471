"""`make test` has at least one case of every exhaustive table."""

from __future__ import annotations

import pytest

from tests.conftest import DAILY_TABLES, REPOSITORY

# Tables without a daily case, and the reason. Remove entries; instead of adding one, give a table a case that takes
# seconds, and name it with the mark `daily`.
EXCEPTIONS: dict[str, str] = {
    "tests/coming_from_test.py::test_the_commands_run": "programs that train, on samples of real files",
    "tests/configs/config_test.py::test_i3_trains_and_validates_in_chunks_of_one_query": "half a minute of compilation",
    "tests/docs_test.py::test_a_tutorial_prints_what_it_shows_in_jupyter": "Jupyter, in another environment",
    "tests/experiments/mteb_test.py::test_results_in_mteb_files_equal_jaxret_search": "mteb, in another environment",
    "tests/export/language_model_test.py::test_a_language_model_round_trips": "half a minute of compilation",
    "tests/index/bucket_jobs_test.py::test_four_jobs_with_two_killed_write_the_bytes_of_one_on_s3": "a server of S3",
    "tests/launch/launch_test.py::test_every_launcher_trains_encodes_and_searches": "three programs, each on two hosts",
    "tests/models/encoders/flash_test.py::test_a_step_on_several_devices": "half a minute of compilation",
    "tests/parallel/mesh_test.py::test_two_processes_train_stop_resume_and_encode": "minutes: six programs",
    "tests/search/vectors/process_group_test.py::test_four_processes_give_the_result_of_one": "seven programs",
    "tests/search/ray_search_test.py::test_workers_search_what_one_process_does": "a cluster of Ray",
    "tests/serving/clients_test.py::test_clients_of_other_libraries": "other libraries, in another environment",
    "tests/training/loop_test.py::test_killed_and_resumed_in_another_process": "two programs, one long enough to kill",
    "tests/training/packed_run_test.py::test_a_packed_run_equals_a_padded_one": "ten seconds of compilation",
    "tests/training/packed_run_test.py::test_an_epoch_of_real_texts": "an epoch of real data sets",
}
OWN_ENVIRONMENT = ("tests/faults/", "tests/plan/")  # run by the Makefile's targets test-faults and test-plan


def test_every_exhaustive_table_has_a_daily_case(request: pytest.FixtureRequest) -> None:
    """Only tables in the files that were collected with this one."""
    tables = {
        table: daily
        for table, daily in request.config.stash[DAILY_TABLES].items()
        if not table.startswith(OWN_ENVIRONMENT)
    }
    assert [table for table, daily in tables.items() if not daily and table not in EXCEPTIONS] == []
    assert [table for table in EXCEPTIONS if tables.get(table)] == [], "remove it from EXCEPTIONS"


def test_the_exceptions_exist() -> None:
    for table in EXCEPTIONS:
        path, _, name = table.partition("::")
        assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{table}: remove it from EXCEPTIONS"
