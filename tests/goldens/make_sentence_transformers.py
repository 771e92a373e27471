"""Write tests/goldens/sentence_transformers.npz: vectors of sentence-transformers for tiny directories.

    python -m tests.goldens.make_sentence_transformers folders FOLDER       in this project's environment
    python tests/goldens/make_sentence_transformers.py vectors FOLDER       where sentence-transformers is installed

The stored values are from sentence-transformers 6.2.0 on torch 2.13.0. No test imports this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def folders(root: Path) -> None:
    from jaxret.export.compare_original import sample_texts
    from tests.export.import_model_test import STOCK
    from tests.sentence_transformers import write_modules

    for name, changes in STOCK.items():
        write_modules(root / name, **changes)
    (root / "texts.json").write_text(json.dumps(sample_texts()))


def vectors(root: Path) -> None:
    import numpy as np
    from sentence_transformers import SentenceTransformer

    texts = json.loads((root / "texts.json").read_text())
    arrays = {"texts": np.array(texts)}  # stored with the vectors, because the texts depend on Python's version
    for folder in sorted(root.glob("*/")):
        model = SentenceTransformer(str(folder), device="cpu")
        # Its scores are cosines, which are products of vectors with length 1.
        cosine = model.similarity_fn_name == "cosine"
        # encode_document without its "document" prompt, which it assumes even if the directory has none.
        passage = next((model.prompts[n] for n in ("document", "passage", "corpus") if model.prompts.get(n)), "")
        arrays[f"{folder.name}/query"] = model.encode_query(texts, normalize_embeddings=cosine)
        arrays[f"{folder.name}/passage"] = model.encode(texts, prompt=passage, normalize_embeddings=cosine)
    np.savez_compressed(Path(__file__).with_name("sentence_transformers.npz"), **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    {"folders": folders, "vectors": vectors}[sys.argv[1]](Path(sys.argv[2]))
