"""Compares everything in a folder with its digests, and names what is wrong:

jaxret verify runs/mlr              a run: its files, every array of its checkpoints, its encoded corpora
jaxret verify DIR                   an encoded corpus, an approximate index, or a store of tokens

Nothing is changed. It ends with status 1 if anything is wrong. What is whole and can hardly be meant is an alarm:
vectors that all point the same way, and corpora that different checkpoints encoded.
"""

ARGUMENTS = {"DIR": "a run, an encoded corpus (runs/NAME/embeddings/CORPUS), one of its indexes, or a store of tokens"}


def main(folder: str) -> None:
    from jaxret.tools.verify import verify

    checked = list(verify(folder))
    problems = [one.problem for one in checked if one.problem]
    for problem in problems:
        print(f"bad: {problem}")
    for one in checked:
        if one.alarm:
            print(f"alarm: {one.alarm}")
    if problems:
        raise ValueError(f"{folder}: {len(problems):,} of {len(checked):,} things are wrong, listed above")
    print(f"{folder}: {len(checked):,} things were verified, nothing is wrong")
