"""Write tests/goldens/pylate.npz: vectors and scores of PyLate for tiny directories.

    python -m tests.goldens.make_pylate folders FOLDER       in this project's environment
    python tests/goldens/make_pylate.py vectors FOLDER       where PyLate is installed

The stored values are from PyLate 1.6.0, sentence-transformers 5.3.0 and transformers 5.3.0 on torch 2.13.0. No test
imports this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def folders(root: Path) -> None:
    from tests.models.heads.pylate_test import CASES, TEXTS
    from tests.sentence_transformers import write_pylate

    for name, settings in CASES.items():
        write_pylate(root / name, **settings)
    (root / "texts.json").write_text(json.dumps(TEXTS))


def vectors(root: Path) -> None:
    import numpy as np
    from pylate import models, scores

    texts = json.loads((root / "texts.json").read_text())
    arrays = {"texts": np.array(texts)}  # the texts depend on the version of Python
    for folder in sorted(root.glob("*/")):
        model = models.ColBERT(str(folder), device="cpu")
        queries, passages = model.encode(texts, is_query=True), model.encode(texts, is_query=False)
        arrays[f"{folder.name}/query"] = np.concatenate(queries)
        arrays[f"{folder.name}/passage"] = np.concatenate(passages)
        arrays[f"{folder.name}/counts"] = np.array([[len(q), len(p)] for q, p in zip(queries, passages)])
        each = [[float(scores.colbert_scores([q], [p])[0, 0]) for p in passages] for q in queries]
        arrays[f"{folder.name}/scores"] = np.array(each, np.float32)
    np.savez_compressed(Path(__file__).with_name("pylate.npz"), **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    {"folders": folders, "vectors": vectors}[sys.argv[1]](Path(sys.argv[2]))
