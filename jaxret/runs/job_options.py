"""The options by which the processes of a job find each other."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class JobOptions:
    """The options by which the processes of a job find each other. Raises ValueError for a value that is not allowed.
    `join` checks that the options fit together."""

    coordinator: str = option(
        "",
        'for hosts that start or search together, such as those of a TPU slice: "auto", or host:port of process 0',
    )
    num_processes: int = option(1, "with --coordinator=host:port: number of processes", lower_bound=1)
    process_id: int = option(0, "with --coordinator=host:port: number of this process, from 0", lower_bound=0)
    initialization_timeout: int = option(300, "seconds that several processes wait for each other", lower_bound=1)

    def __post_init__(self) -> None:
        check_options(self)

    def join(self) -> None:
        """Join the job, if the options describe one. Must be called before the first array is made."""
        from jaxret.parallel.processes import initialize_distributed  # imports JAX, which parsing flags must not

        initialize_distributed(self.coordinator, self.num_processes, self.process_id, self.initialization_timeout)
