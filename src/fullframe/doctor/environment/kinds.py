"""Every kind of finding of `fullframe doctor env`: FF2xx, with its reason and its remedy."""

from fullframe.doctor.finding import Kind, Severity

_WRONG, _WASTE, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

VERSIONS = Kind(
    "FF201", _WRONG, "versions that do not work together",
    "They were built against each other's other versions: imports fail, or operators are missing.",
    "install the pair that belongs together",
)  # fmt: skip
NO_GPU_BUILD = Kind(
    "FF202", _WRONG, "torch cannot use the GPU that is there",
    "Ranks would train on the CPU, silently and slowly.",
    "install a torch that was built for this GPU's driver",
)  # fmt: skip
OLD_DRIVER = Kind(
    "FF203", _WRONG, "the driver is too old for torch's CUDA",
    "CUDA does not start.",
    "install a newer driver, or a torch that was built for an older CUDA",
)  # fmt: skip
SMALL_SHARED_MEMORY = Kind(
    "FF204", _WRONG, "/dev/shm is small",
    "Loader workers hand over batches in it, and gloo and NCCL their messages: a bus error ends the rank.",
    "docker run --ipc=host or --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm",
)  # fmt: skip
FEW_FILES = Kind(
    "FF205", _NOTE, "few open files are allowed",
    "Loader workers hand over each tensor as a file: 'Too many open files' comes after hours.",
    "ulimit -n 65536",
)  # fmt: skip
LITTLE_MEMORY = Kind(
    "FF206", _WASTE, "little memory is left in this container",
    "The kernel kills a rank that asks for more, with SIGKILL and without a word.",
    "raise the limit of the job (--mem, resources.limits.memory), or end what holds it",
)  # fmt: skip
CPU_QUOTA = Kind(
    "FF207", _WASTE, "more threads than processors",
    "Each rank starts a thread for every processor it sees, more than it is given: they wait for each other.",
    "set OMP_NUM_THREADS to processors / ranks",
)  # fmt: skip
LOCKED_MEMORY = Kind(
    "FF208", _WASTE, "locked memory is limited and there is InfiniBand",
    "Registering buffers fails, and NCCL ends or falls back to sockets.",
    "ulimit -l unlimited (docker run --ulimit memlock=-1)",
)  # fmt: skip
INCOMPLETE_LAUNCH = Kind(
    "FF210", _WRONG, "a launcher's variables are not complete",
    "The process group waits for what is missing, or fails.",
    "start by torchrun or fullframe train, or set all of them; unset what an earlier job left",
)  # fmt: skip
CONTRADICTING_RANKS = Kind(
    "FF211", _WRONG, "variables contradict each other",
    "Ranks wait for others that do not exist, or two have the same place.",
    "leave them to one launcher, and unset what another left",
)  # fmt: skip
LOCAL_MASTER = Kind(
    "FF212", _WRONG, "MASTER_ADDR means this machine on every machine",
    "Each machine waits for its own rank 0.",
    "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1), or the first machine's name",
)  # fmt: skip
BAD_PORT = Kind(
    "FF213", _WRONG, "MASTER_PORT is no port",
    "Rank 0 cannot listen there.",
    "a free port from 1024 to 65535",
)  # fmt: skip
UNKNOWN_NAME = Kind(
    "FF214", _WRONG, "a host name that does not resolve",
    "gloo and the store look it up before anything else.",
    "add it to /etc/hosts, or name the network interface by GLOO_SOCKET_IFNAME",
)  # fmt: skip
VISIBLE_DEVICES = Kind(
    "FF215", _WRONG, "CUDA_VISIBLE_DEVICES does not fit",
    "Ranks share a GPU or find none.",
    "leave it to the scheduler, or list each GPU once",
)  # fmt: skip
NO_INTERFACE = Kind(
    "FF216", _WRONG, "a network interface that is not there",
    "The process group does not start.",
    "name one of those that are there, or unset the variable",
)  # fmt: skip
SLOWED_BY_VARIABLE = Kind(
    "FF217", _WASTE, "a variable that slows ranks down",
    "It was set to look for an error, and costs time in every step.",
    "unset it",
)  # fmt: skip
OLD_VARIABLE = Kind(
    "FF218", _NOTE, "a variable that torch no longer reads",
    "It has another name today, so what was meant by it does not happen.",
    "set the new one",
)  # fmt: skip
ORPHANS = Kind(
    "FF220", _WASTE, "ranks of an earlier run are still there",
    "They hold memory, processors, ports and perhaps a GPU.",
    "end them by their number",
)  # fmt: skip
GPU_IN_USE = Kind(
    "FF221", _WASTE, "a GPU is in use",
    "What another process holds is missing here, and it takes computing time.",
    "choose another GPU, or end the process if it is yours",
)  # fmt: skip
THROTTLED = Kind(
    "FF222", _WASTE, "a GPU is slowed down",
    "Its clock is held low, and all ranks wait for the slowest.",
    "look at cooling and power (nvidia-smi -q -d PERFORMANCE), or leave this GPU out",
)  # fmt: skip
MIXED_GPUS = Kind(
    "FF223", _WASTE, "GPUs of different kinds",
    "All ranks wait for the slowest, and the smallest memory is the limit of all.",
    "choose GPUs of one kind by CUDA_VISIBLE_DEVICES",
)  # fmt: skip
NO_PEER = Kind(
    "FF224", _WASTE, "GPUs that cannot reach each other",
    "Messages between them go through host memory.",
    "nvidia-smi topo -p2p r; switch off ACS or IOMMU in the BIOS for PCIe peers",
)  # fmt: skip
SLOW_LINK = Kind(
    "FF225", _WASTE, "a slow link between two ranks",
    "Every message waits for the slowest pair.",
    "look at what else uses the link; place the ranks of a replica on machines or GPUs that are close",
)  # fmt: skip
MEMORY_ERRORS = Kind(
    "FF226", _WRONG, "a GPU has memory errors",
    "Uncorrected errors since the driver started: numbers may be wrong.",
    "reset or replace the GPU",
)  # fmt: skip
WRONG_CONVOLUTIONS = Kind(
    "FF227", _WASTE, "bf16 convolutions that this processor computes wrongly",
    "With AMX, oneDNN reads past the rows of narrow maps where a convolution has a stride. Split ranks are kept from "
    "it, plain torch is not.",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or fp32 on the CPU",
)  # fmt: skip

KINDS: tuple[Kind, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Kind))
