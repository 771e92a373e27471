"""Options of a process that is one of several of a job."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs.options import option


@dataclass(frozen=True)
class JobOptions:
    """How the processes of a job find each other."""

    coordinator: str = option(
        "",
        'where hosts start together, as those of a TPU slice, or search together: "auto", or host:port of process 0',
    )
    num_processes: int = option(1, "with --coordinator=host:port: how many processes there are")
    process_id: int = option(0, "with --coordinator=host:port: number of this process, from 0")
    initialization_timeout: int = option(300, "seconds that several processes wait for each other")

    def join(self) -> None:
        """Join the job, if there is one. Called before the first array is made."""
        from jaxret.parallel.processes import initialize_distributed  # it imports JAX, and flags are parsed without

        initialize_distributed(self.coordinator, self.num_processes, self.process_id, self.initialization_timeout)
