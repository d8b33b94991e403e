# shellcheck shell=bash
# Everything that depends on the site. Edit this file once per cluster; every script in this folder reads it.
# A variable that is already set in your shell wins over the value here: `WM_NODES=8 slurm/submit.sh …`.
# An empty value means: leave the option out and take SLURM's default.

# --- Where the jobs go --------------------------------------------------------------------------------------
: "${WM_PARTITION:=}"            # partition of training and evaluation (sinfo lists them)
: "${WM_CPU_PARTITION:=}"        # partition of tokenizing and export, which need no GPU
: "${WM_ACCOUNT:=}"              # account to charge (sacctmgr show assoc user=$USER)
: "${WM_QOS:=}"                  # quality of service
: "${WM_CONSTRAINT:=}"           # node features, for example "h100"
: "${WM_SBATCH_EXTRA:=}"         # any further sbatch options for all jobs, separated by spaces

# --- How large ----------------------------------------------------------------------------------------------
: "${WM_NODES:=1}"               # nodes of the training job; the global batch does not depend on it
: "${WM_GPUS_PER_NODE:=8}"       # GPUs per node = ranks per node
: "${WM_EXCLUSIVE=1}"            # training takes whole nodes; set it to nothing where several jobs share a node
: "${WM_CPUS_PER_GPU:=8}"        # CPU cores of each rank
: "${WM_TRAIN_TIME:=24:00:00}"   # time limit of one start of the training job; it goes on by itself afterwards
: "${WM_CPU_TIME:=08:00:00}"     # time limit of the other jobs
: "${WM_CPU_CPUS:=16}"           # cores of a tokenizing or export job
: "${WM_CPU_MEMORY:=64G}"        # memory of a tokenizing or export job
: "${WM_SLICES:=16}"             # tokenizing: array tasks that share the input

# evaluate.tasks: the jobs that score saved checkpoints while a run trains
: "${WM_TASKS_GPUS:=1}"          # their GPUs; 0: they go to WM_CPU_PARTITION
: "${WM_TASKS_POLL:=30}"         # seconds between looks at what the trainer wants evaluated

# --- The software on the nodes ------------------------------------------------------------------------------
# Modules or anything else that has to be loaded in a job (not needed where a container brings it all).
wm_site_setup() {
  :
  # module purge
  # module load cuda/12.8 gcc/13
}
: "${WM_PYTHON:=$PWD/.venv/bin/python}"   # python of the ranks (inside the container, where there is one)
: "${WM_BATCH_PYTHON:=$WM_PYTHON}"        # python 3.11+ of the batch script on the first node, no packages needed
: "${WM_SERVE_VENV:=$PWD/.venv-vllm}"     # environment with vLLM and serving/vllm, for serve.sbatch (docs/serving.md)
: "${WM_SERVE_PORT:=8000}"                # port of that server
# pyxis/enroot: an image turns the container on; it must hold the packages of requirements.txt. Off by default.
: "${WM_CONTAINER_IMAGE:=}"               # for example /images/wm_ds.sqsh or nvcr.io#nvidia/pytorch:25.06-py3
: "${WM_CONTAINER_MOUNTS:=}"              # source:target,… beside this repository, which is always mounted

# --- The network --------------------------------------------------------------------------------------------
# Which interface NCCL and gloo use to find each other. Left empty, they choose, which goes wrong where nodes have
# a management network besides the fast one: `ip -brief address` on a compute node shows the names.
: "${WM_SOCKET_INTERFACE:=}"              # for example "ib0" or "^lo,docker0" (NCCL's notation; gloo needs a plain name)
# export NCCL_IB_HCA=mlx5                 # which InfiniBand adapters
# export NCCL_DEBUG=INFO                  # when NCCL does not start
# Where the ranks meet is found by itself; set it only where that fails. (MASTER_ADDR and MASTER_PORT of the shell that
# submits are not used: they are what an earlier program left there.)
: "${WM_MASTER_ADDR:=}"                   # a name or address of the first node that all nodes reach
: "${WM_MASTER_PORT:=}"                   # a port that is free on it

# --- When things go wrong -----------------------------------------------------------------------------------
: "${WM_GRACE_SECONDS:=180}"     # asked to stop so long before the time limit; one step and one checkpoint must fit
: "${WM_MAX_CRASHES:=5}"         # crashes of one job that are followed by another start
: "${WM_MAX_SAME_STEP:=3}"       # crashes at one and the same step that end the job
: "${WM_HANG_TIMEOUT:=1200}"     # seconds without a step after which all ranks dump their stacks and end;
                                 # a checkpoint or an evaluation must fit, and run.timeout_minutes be more
: "${WM_LEASE_SECONDS:=90}"      # an attempt that did not end by itself must have been silent so long
: "${WM_CHECK_SECONDS:=45}"      # seconds that the check of the nodes may take
: "${WM_MIN_RUN_GIB:=50}"        # free space required in the run directory
: "${WM_MIN_TMP_GIB:=1}"         # free space required in every node's /tmp
: "${WM_MIN_GPU_GIB:=0}"         # memory required of every GPU

# --- What the ranks see ---------------------------------------------------------------------------------------
export WM_HANG_TIMEOUT WM_LEASE_SECONDS
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# DeepSpeed's compiled extensions; default: a folder in ~/.cache/wm_ds, filled by `make install` on a login node; where
# the job has no home that it can write, a folder of its user id in TMPDIR or /tmp.
# export TORCH_EXTENSIONS_DIR=/shared/wm_ds/extensions     # where home is not the same on all nodes
if [ -n "$WM_SOCKET_INTERFACE" ]; then
  export NCCL_SOCKET_IFNAME="$WM_SOCKET_INTERFACE" GLOO_SOCKET_IFNAME="$WM_SOCKET_INTERFACE"
fi
