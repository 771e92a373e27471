"""Compares results that `jaxret search` and `jaxret rerank` wrote, on the same data: means, deviations
over seeds, paired tests:

jaxret compare runs/dual-1 runs/dual-2 runs/mlr-1 runs/mlr-2      runs that differ in their seeds alone are one system
jaxret compare dual=runs/a,runs/b mlr=runs/c,runs/d               systems that are named here
jaxret compare runs/mlr/eval/scifact.test.json runs/mvr/eval/scifact.test.json

The first system is the baseline. Results on other queries, judgements or passages are refused.
"""

from absl import flags

ARGUMENTS = {"RUN...": "folders of runs or result files (runs/NAME/eval/DATA.json); NAME=RUN,RUN is one system"}

_DATA = flags.DEFINE_string("data", "", "name of the result (eval/NAME.json), needed if the folders have several")
_MEASURES = flags.DEFINE_list("measures", None, "which; default: all that every result has (Holm counts them all)")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "markdown", "json"], "what is printed")
_SEED = flags.DEFINE_integer("seed", 0, "of the randomisation test and the intervals")
_RESAMPLES = flags.DEFINE_integer("resamples", 100_000, "sign vectors of the randomisation test", lower_bound=1000)


def main(*runs: str) -> None:
    import json

    from jaxret.tools.compare import compare_runs, notes

    found, systems = compare_runs(runs, _DATA.value, _MEASURES.value or (), _SEED.value, _RESAMPLES.value)
    if _FORMAT.value == "json":
        results = {name: [str(result.path) for result in of] for name, of in systems.items()}
        data = next(iter(systems.values()))[0].data
        print(json.dumps({**found.to_json(), "results": results, "data": data, "notes": notes(systems)}, indent=1))
    else:
        print(found.to_markdown() if _FORMAT.value == "markdown" else found.to_text())
        for note in notes(systems):
            print(f"\n{note}")
