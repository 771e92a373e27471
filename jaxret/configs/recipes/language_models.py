"""LoRA on language models: RepLLaMA, Tevatron's Mistral and Qwen3-Embedding on SciFact, by their published settings.

:llama3, :qwen3_full and :gemma_full are not published. :llama3 is RepLLaMA's recipe on Llama 3.1. :qwen3_full trains
Qwen3-0.6B at the rate of Qwen's documentation, and :gemma_full EmbeddingGemma, both without LoRA. Parameters are split
over all devices. A batch has 32 queries with 16 passages each, as in Tevatron's examples; on MS MARCO a step has four.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import one_stage as stages  # noqa: F401
from jaxret.configs.base import require_suffix

QWEN3 = {size: f"Qwen/Qwen3-Embedding-{size.upper()}" for size in ("0.6b", "4b", "8b")}
CHECKPOINTS = {
    "repllama": "meta-llama/Llama-2-7b-hf",
    "llama3": "meta-llama/Llama-3.1-8B",
    "mistral": "mistralai/Mistral-7B-v0.1",
    **{f"qwen3_{size}": checkpoint for size, checkpoint in QWEN3.items()},
    "qwen3_full": QWEN3["0.6b"],
    "gemma_full": "google/embeddinggemma-300m",
}
SUFFIXES = tuple(CHECKPOINTS)
NOT_K = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def get_config(suffix: str) -> ConfigDict:
    require_suffix("recipes/language_models.py", suffix, SUFFIXES)
    config = base()
    config.encoder.checkpoint = CHECKPOINTS[suffix]
    config.encoder.tied = True
    config.encoder.dtype, config.encoder.recompute = "bfloat16", "layer"
    config.head.token = "last"
    config.normalize = True
    config.loss.temperature = 0.01
    config.tokens.title_separator = " "
    config.tokens.query_length = 32
    config.data.negatives = 15
    config.train.batch_size, config.train.chunk_size = 32, 1
    config.optimizer.learning_rate, config.optimizer.warmup_fraction, config.optimizer.clip_norm = 1e-4, 0.1, 1.0
    config.validation.best = "last"
    config.mesh.fsdp = 0
    if not suffix.endswith("full"):
        config.lora.rank, config.lora.alpha, config.lora.dropout = 16, 64.0, 0.1
    if suffix in ("repllama", "llama3", "mistral"):
        config.train.accumulate, config.train.epochs = 4, 1.0
        config.tokens.prompts = "tevatron_mistral" if suffix == "mistral" else "repllama"
        config.tokens.passage_length = 156 if suffix == "mistral" else 196
    else:
        config.tokens.passage_length, config.train.epochs = 512, 10.0
    if config.tokens.prompts == "repllama":
        config.lora.rank, config.lora.targets = 32, NOT_K
        config.optimizer.warmup_steps = 100
    if suffix.startswith("qwen3"):
        config.tokens.query_prompt = "Find a relevant scientific paper abstract to support or reject the claim. Query: "
    if suffix == "gemma_full":
        config.tokens.prompts, config.tokens.query_length = "embedding_gemma", 64
        config.head.token, config.head.dual_encoder.dense = "mean", (3072, 768)
    if suffix.endswith("full"):
        config.optimizer.learning_rate = 6e-6 if suffix == "qwen3_full" else 2e-5
    return config
