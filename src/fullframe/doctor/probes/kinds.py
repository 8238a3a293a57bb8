"""Every kind of finding of `fullframe doctor run`: FF3xx, with its reason and its remedy."""

from fullframe.doctor.finding import Kind, Severity

_WRONG, _WASTE, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

GRADIENTS_DIFFER = Kind(
    "FF301", _WRONG, "gradients differ between ranks",
    "Each rank then updates its own model by its own samples: after some steps there are as many models as ranks.",
    "wrap the model in DistributedDataParallel (or fullframe.parallelize), call the wrapper and not its .module, and "
    "leave no_sync() for the last microbatch",
)  # fmt: skip
STARTED_APART = Kind(
    "FF302", _WRONG, "ranks start with different weights",
    "Averaged gradients of different models mean nothing. Ranks that draw their initial weights from different seeds "
    "start so, unless a wrapper hands out those of the first rank.",
    "wrap the model in DistributedDataParallel, which hands out the first rank's weights, or set the same seed on all "
    "ranks before the model is made",
)  # fmt: skip
DRIFTED = Kind(
    "FF303", _WRONG, "weights drift apart",
    "They were equal at the start, and the ranks no longer hold the same model: something changes them on one rank "
    "alone, or by another rule.",
    "change parameters only by the optimizer, from averaged gradients, with the same learning rate on all ranks",
)  # fmt: skip
RATES_DIFFER = Kind(
    "FF304", _WRONG, "learning rates differ between ranks",
    "Equal gradients times different rates: the weights drift apart.",
    "compute the rate from what is equal on all ranks: the step number, a validation loss that was reduced over ranks",
)  # fmt: skip
SAME_SAMPLES = Kind(
    "FF305", _WRONG, "several replicas read the same samples",
    "The ranks then do the same work twice: the job costs as many devices as there are, and learns as from one.",
    "give the DataLoader DistributedSampler(dataset), or use fullframe.ShardedLoader; let an IterableDataset skip by "
    "rank and worker",
)  # fmt: skip
UNREAD_SAMPLES = Kind(
    "FF306", _WASTE, "samples that no rank reads",
    "A part of the data is never trained on.",
    "give the sampler num_replicas and rank of this job (DistributedSampler takes them from the process group)",
)  # fmt: skip
SAME_ORDER = Kind(
    "FF307", _WASTE, "the same order in every epoch",
    "DistributedSampler shuffles by seed + epoch, and is not told the epoch: batches are made of the same samples "
    "again and again.",
    "call loader.sampler.set_epoch(epoch) before each epoch",
)  # fmt: skip
REPLICA_READS_APART = Kind(
    "FF308", _WRONG, "ranks of one replica read different samples",
    "Ranks that share a frame would each hold a part of another one.",
    "use fullframe.ShardedLoader, or give the sampler the mesh's 'data' coordinate as its rank",
)  # fmt: skip
SIZES_DIFFER = Kind(
    "FF309", _WASTE, "replicas read batches of different sizes",
    "The mean over replicas of their means is not the mean over the batch: samples of small batches weigh more.",
    "drop_last=True, or weigh each replica's loss by its count of the whole batch's",
)  # fmt: skip
NO_GRADIENT = Kind(
    "FF310", _WRONG, "the loss has no gradient",
    "Nothing is learned from it: the loss was computed under no_grad, from .item(), .detach(), numpy or argmax, or no "
    "parameter that is trained is on the way to it.",
    "compute the loss from the model's output by torch functions that have a gradient, with grad mode on and the "
    "parameters' requires_grad set",
)  # fmt: skip
UNUSED = Kind(
    "FF311", _WASTE, "parameters that get no gradient",
    "They are trained by name only, and DistributedDataParallel waits for their gradients.",
    "use them in the loss, or take them out of the model, or freeze them by requires_grad_(False)",
)  # fmt: skip
FROZEN_IN_OPTIMIZER = Kind(
    "FF312", _WASTE, "frozen parameters in the optimizer",
    "They are handed to be trained and have requires_grad=False, so they never change.",
    "requires_grad_(True) where they are to be trained; otherwise give the optimizer the others alone",
)  # fmt: skip
IN_NO_OPTIMIZER = Kind(
    "FF313", _WRONG, "parameters that no optimizer holds",
    "Their gradients are computed and never used.",
    "make the optimizer after the model is complete, of all its parameters",
)  # fmt: skip
ZERO_GRADIENT = Kind(
    "FF314", _WASTE, "gradients that are zero in every step",
    "The parameters are connected to the loss and learn nothing: dead units, a mask of zeros, a detached branch.",
    "look at what is multiplied by zero behind them; lower the learning rate where units have died",
)  # fmt: skip
NEVER_CHANGES = Kind(
    "FF315", _WASTE, "parameters that do not change",
    "They have gradients, and a step leaves them as they are to the bit: a learning rate of 0, steps that are all "
    "skipped, or updates below the rounding of a 16-bit parameter.",
    "look at the learning rate of their group; keep fp32 parameters and compute in bf16 by autocast",
)  # fmt: skip
STALE_GRADIENT = Kind(
    "FF316", _WRONG, "gradients are never cleared",
    "Backward adds to the gradient that is there: each step repeats all gradients before it.",
    "optimizer.zero_grad() after each optimizer.step()",
)  # fmt: skip
GRAPH_GROWS = Kind(
    "FF317", _WRONG, "the graph of backward grows from step to step",
    "Backward walks through all earlier steps: time and memory grow until it ends out of memory.",
    "detach what is carried from one step to the next",
)  # fmt: skip
GRAPH_KEPT = Kind(
    "FF318", _WASTE, "graphs of earlier steps are kept",
    "A tensor that is kept with its graph keeps all activations behind it: memory grows with every step.",
    "keep loss.item() or loss.detach() in place of the loss",
)  # fmt: skip
SCALED_STEP = Kind(
    "FF319", _WRONG, "an update with gradients that are still scaled",
    "The loss was multiplied by the GradScaler's scale and the gradients were never divided by it: the update is as "
    "many times too large, and overflows are not skipped.",
    "scaler.step(optimizer) in place of optimizer.step()",
)  # fmt: skip
SCALED_CLIP = Kind(
    "FF320", _WRONG, "clipping of gradients that are still scaled",
    "The norm is that of the scaled gradients, thousands of times too large: every step is clipped to almost nothing.",
    "scaler.unscale_(optimizer) before clipping",
)  # fmt: skip
SCALER_UPDATES = Kind(
    "FF321", _WRONG, "the GradScaler is not updated once a step",
    "Without update() the scale never follows the gradients, and the next step() is refused or skipped; with several a "
    "step it grows and falls too fast.",
    "call scaler.update() once, after the last scaler.step() of an iteration",
)  # fmt: skip
SCALE_FALLS = Kind(
    "FF322", _WASTE, "the loss scale falls in every step",
    "Every step overflows and is skipped: nothing is learned until the scale fits, or ever.",
    "bf16 in place of fp16; look for what overflows in the forward pass (a sum over pixels, exp, a norm in fp16)",
)  # fmt: skip
NOT_FINITE = Kind(
    "FF323", _WRONG, "a loss or gradients that are not finite",
    "One update with them makes every parameter NaN.",
    "look at the first module whose output is not finite; lower the learning rate, clip gradients, mend the data",
)  # fmt: skip
STARVES = Kind(
    "FF324", _WASTE, "the loader does not keep up",
    "The devices wait for data.",
    "more workers (num_workers, recipe.workers), persistent_workers=True, cheaper decoding, or data stored decoded",
)  # fmt: skip
NOT_REPEATABLE = Kind(
    "FF325", _WASTE, "the same step gives other numbers",
    "From the same seed and the same batch: a run cannot be repeated, and a resumed one is another.",
    "draw from torch's, numpy's or Python's global generators, which are seeded; on a GPU, --deterministic",
)  # fmt: skip
DATA_NOT_REPEATABLE = Kind(
    "FF326", _WASTE, "the same sample reads differently",
    "From the same seed: the dataset draws from a generator of a module, the clock or the process, so a resumed run "
    "reads other data, and ranks of a replica may read different samples.",
    "draw from torch's, numpy's or Python's global generators inside __getitem__, or from one that the dataset holds",
)  # fmt: skip
MEMORY_OFF = Kind(
    "FF327", _WASTE, "memory is not as predicted",
    "What is held beyond the prediction is no part of model, optimizer, activations and messages: a leak, a copy, "
    "another process's, or a library's.",
    "fullframe simulate shows what is predicted and where; look at what the recipe holds beside the model",
)  # fmt: skip
FEW_VALUES = Kind(
    "FF328", _WASTE, "batch norm over few values",
    "Statistics of so few values are noise, in training and in the running statistics that evaluation uses.",
    "more samples a rank, SyncBatchNorm or --sync-batchnorm, or group norm",
)  # fmt: skip
STATISTICS_OF_EVALUATION = Kind(
    "FF329", _WRONG, "evaluation changes the statistics of batch norm",
    "The model runs under no_grad in training mode: running statistics take the evaluation's data in, and dropout is "
    "on.",
    "model.eval() before evaluation, model.train() after it",
)  # fmt: skip
COUNTED_TWICE = Kind(
    "FF330", _WASTE, "recompute counts a batch twice in batch norm",
    "The block is computed again in backward, in training mode, and its running statistics take the batch in again.",
    "leave the batch norm outside the checkpointed function, or set its momentum to 1 - sqrt(1 - momentum); "
    "--recompute does this by itself",
)  # fmt: skip
TRAINS_IN_EVAL_MODE = Kind(
    "FF331", _WASTE, "training in eval mode",
    "Dropout is off and batch norm uses its running statistics: mostly a model.train() that is missing after "
    "evaluation.",
    "model.train() before training",
)  # fmt: skip
EVALUATION_KEEPS_GRAPH = Kind(
    "FF332", _WASTE, "evaluation with a graph",
    "Activations of every evaluated batch are kept for a backward pass that never comes.",
    "run evaluation under torch.no_grad() or torch.inference_mode()",
)  # fmt: skip
SENT_EVERY_MICROBATCH = Kind(
    "FF333", _WASTE, "gradients are sent in every microbatch",
    "One message after the last microbatch is enough: the others cost time and change nothing.",
    "with model.no_sync(): around all microbatches but the last",
)  # fmt: skip
DIFFERENT_STEPS = Kind(
    "FF334", _WRONG, "ranks take different numbers of steps",
    "A rank that is through leaves the others waiting for its messages for ever.",
    "give all ranks equally many batches: a DistributedSampler, drop_last=True, DistributedDataParallel's join()",
)  # fmt: skip
HANGS = Kind(
    "FF335", _WRONG, "ranks wait for each other",
    "The ranks do not send the same messages in the same order: an operation in which all ranks take part stands under "
    "an if that only some enter.",
    "take every decision about messages from what all ranks know",
)  # fmt: skip
FAILED = Kind(
    "FF336", _WRONG, "the program ends with an error",
    "It would have ended so in the real run.",
    "see the message and the last line of the trace",
)  # fmt: skip
SAME_DEVICE = Kind(
    "FF337", _WRONG, "several ranks on one GPU",
    "They share its memory and its time, and NCCL refuses to send between them.",
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else, and model.to('cuda')",
)  # fmt: skip
SOUGHT_IN_VAIN = Kind(
    "FF338", _NOTE, "unused parameters are sought and there are none",
    "DistributedDataParallel(find_unused_parameters=True) walks the graph in every step.",
    "leave the option out",
)  # fmt: skip
NO_JOB = Kind(
    "FF339", _WRONG, "the ranks never meet",
    "Each process trains alone on all data: the script makes no process group.",
    "torch.distributed.init_process_group() (or fullframe.init_mesh()) at the start of the script; "
    "where it is to run alone, fullframe doctor run --processes 1",
)  # fmt: skip
NOTHING_SEEN = Kind(
    "FF340", _WRONG, "no step was taken",
    "The program ended before an optimizer took a step, so there is nothing to judge.",
    "check that the script trains when it is run like this, and that the loader is not empty",
)  # fmt: skip
FROZEN_STATISTICS = Kind(
    "FF341", _NOTE, "batch norm of a frozen part keeps counting",
    "Frozen weights do not keep a batch norm in training mode from following the new data: the frozen part changes "
    "all the same, and is another one in evaluation.",
    "put the frozen part into eval mode after each model.train(), as in model.backbone.eval()",
)  # fmt: skip
PIXELS_AS_BYTES = Kind(
    "FF342", _WASTE, "images are not scaled",
    "Weights are initialised, and pretrained, for inputs of about unit size; pixels of 0 to 255 make the gradients of "
    "the first layer a hundred times as large as those that its learning rate is meant for.",
    "(image / 255 - mean) / std, with the mean and spread that the pretrained weights were made with",
)  # fmt: skip

KINDS: tuple[Kind, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Kind))
