"""Generated input: a few fixed cases in every run of the tests, new ones in CI (JAXRET_FUZZ=new), and many new ones
with `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]

settings.register_profile(
    "few", max_examples=15, derandomize=True, deadline=None, database=None, suppress_health_check=CHECKS
)
settings.register_profile("new", max_examples=100, deadline=None, suppress_health_check=CHECKS, print_blob=True)
settings.register_profile("many", max_examples=1500, deadline=None, suppress_health_check=CHECKS)
settings.load_profile(os.environ.get("JAXRET_FUZZ", "few"))
