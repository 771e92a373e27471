"""Every key there is, with its meaning; as it stands, the plain dual encoder (DPR) on BERT-base.

Any key can be set on the command line: --config.optimizer.learning_rate=1e-5. An unknown key is an error.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()

    # What the encoder is. checkpoint: a Hugging Face directory, a hub name (looked up in the local cache), or
    # package:NAME/FOLDER for weights shipped in an installed Python package.
    c.encoder = ConfigDict()
    c.encoder.checkpoint = "bert-base-uncased"
    c.encoder.download = False  # True: fetch a hub name that is not in the cache; the only use of the network
    c.encoder.sha256 = ""  # of model.safetensors; verified if given
    # Name prefixes of tensors that may stay unused: poolers, MLM heads, T5's and the pre-trainers' decoders. Anything
    # else in the file that the encoder does not need is an error.
    c.encoder.ignore = ("pooler", "cls", "lm_head", "vocab_", "decoder", "c_head")
    c.encoder.tied = False  # True: one encoder for queries and passages
    c.encoder.dtype = "float32"  # compute type, float32 or bfloat16; parameters are always float32
    c.encoder.normalize_intermediate = False  # T5: give every layer the final norm (the reference takes them raw)
    c.encoder.remat = False  # recompute each layer in the backward pass: less memory, a third more time

    # How hidden states become vectors.
    c.head = ConfigDict()
    c.head.name = "last_layer"  # last_layer (V = 1) or layers (V = number of head.layers)
    c.head.token = "cls"  # cls: the first token stands for the text; mean: the mean over its tokens
    c.head.layers = ()  # for head layers: which, the last one included; 0 is the output of the embeddings
    c.pooling = "none"  # of the V vectors: none (score = max), average, scalar_mix, self_contrastive
    c.normalize = False  # scale every vector to length 1

    # How text becomes tokens. Longer texts are cut; how many is printed before training and encoding.
    c.tokens = ConfigDict()
    c.tokens.query_length = 256
    c.tokens.passage_length = 256
    c.tokens.length_multiple = 32  # training batches are padded to a multiple of this: one program per shape

    # What to train on. train and dev: a BEIR folder (with the split's name) or a DPR file.
    c.data = ConfigDict()
    c.data.train = ""
    c.data.train_split = "train"
    c.data.dev = ""  # empty: no validation, the last checkpoint is the best
    c.data.dev_split = "dev"
    c.data.negatives = 1  # hard negatives per query, next to all other documents of the batch
    c.data.negatives_run = ""  # for BEIR: a TREC run; what it retrieved and nobody judged relevant are hard negatives
    c.data.on_error = "error"  # bad records: error (stop with file and line) or skip (counted)

    c.loss = ConfigDict()
    c.loss.temperature = 1.0  # scores are divided by it; 1 for raw dot products, about 0.05 if normalize
    c.loss.local_temperature = 1.0  # the same for the softmax over one document's vectors
    c.loss.local_weight = 0.0  # lambda of the local term (pooling self_contrastive)

    c.optimizer = ConfigDict()
    c.optimizer.learning_rate = 2e-5  # the peak, after warm-up; then linearly to 0
    c.optimizer.warmup_fraction = 0.05  # of all steps
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0  # not applied to biases and layer norms
    # Clipping by the true gradient's norm. Trainers that average gradients of a gathered loss over W processes clip
    # at W times their setting: to reproduce "2.0 on 4 GPUs" write 8.0.
    c.optimizer.clip_norm = 2.0

    c.train = ConfigDict()
    c.train.batch_size = 128  # queries per step, over all devices
    c.train.epochs = 40.0
    c.train.steps = -1  # if >= 0, used instead of epochs; 0 writes the untrained encoder as a checkpoint
    c.train.chunk_size = 0  # gradient caching: queries encoded at a time, with their documents; 0 is all at once
    c.train.log_every = 10  # steps
    c.train.checkpoint_every = 0  # steps between validations and checkpoints; 0: once an epoch

    c.validation = ConfigDict()
    c.validation.batch_size = 128
    c.validation.pool_size = 2000  # dev passages, filled up with training passages to this number, to retrieve from
    c.validation.metric = "RR@10"  # which checkpoint is best: RR@10, Success@5, Success@20 over the pool, or nll

    # Separate seeds, so that one can be varied alone.
    c.seed = ConfigDict()
    c.seed.init = 12345
    c.seed.data = 12345
    c.seed.dropout = 12345
    c.seed.negatives = 12345

    c.mesh = ConfigDict()
    c.mesh.fsdp = 1  # parameters are split over this many devices, the batch over all
    c.mesh.coordinator = ""  # several hosts: "auto" on a TPU pod or under Slurm, else host:port of process 0
    c.mesh.num_processes = 1
    c.mesh.process_id = 0

    c.encode = ConfigDict()
    c.encode.tokens_per_batch = 16384
    c.encode.shard_rows = 50000  # passages per shard; shards depend on the corpus, never on the machine
    c.encode.dtype = "float32"  # of the vectors on disk: float32 or float16

    return c
