#!/usr/bin/env bash
# Submit a run: pack -> merge -> train -> export -> evaluate, each job waiting for the success of the one before.
#
#   slurm/submit.sh [options] CONFIG [key=value …]
#
#   CONFIG, key=value    the run, as for `python -m wm_ds.train`
#   --run DIR            run directory (default: runs/NAME of configs/NAME.yaml)
#   --stages LIST        of pack,train,export,evaluate (default: train,export,evaluate; with --input also pack)
#   --input PATH         texts to pack, may be repeated; a quoted glob or a folder works too
#   --tokenizer PATH     tokenizer to pack with
#   --data DIR           where the packed data goes (default: data/NAME); training reads it
#   --pack ARG           a further argument for tools/pack_data.py, may be repeated (--pack=--seq-len=2048)
#   --export ARG         the same for tools/export_hf.py
#   --evaluate ARG       arguments of python -m wm_ds.evaluate (default: perplexity RUN)
#   --nodes N            nodes of the training job (default: WM_NODES); also after a stop, for the same run
#   --gpus-per-node N    GPUs, and ranks, per node (default: WM_GPUS_PER_NODE)
#   --time LIMIT         time limit of one start of the training job (default: WM_TRAIN_TIME)
#   --list FILE          an array of runs instead of CONFIG, as tools/sweep.py --slurm writes it: train, evaluate
#   --dry-run            print the sbatch commands and submit nothing
#
# What depends on the cluster is in slurm/env.sh. A stage whose predecessor fails is cancelled.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=slurm/env.sh
. slurm/env.sh
# shellcheck source=slurm/common.sh
. slurm/common.sh

usage() { sed -n '2,/^# What depends/s/^# \{0,1\}//p' slurm/submit.sh; }
refuse() {
  echo "error: $*" >&2
  exit 2
}

run='' stages='' data='' tokenizer='' dry='' list='' inputs=() pack=() export=() evaluate=()
while [ $# -gt 0 ]; do
  case $1 in
  --*=*) option=${1%%=*} value=${1#*=} taken=1 ;;
  --dry-run | --help | -h) option=$1 taken=1 ;;
  --*) option=$1 value=${2-} taken=2 ;;
  *) break ;;
  esac
  [ $# -ge "$taken" ] || refuse "$option needs a value; slurm/submit.sh --help lists the options"
  case $option in
  --run) run=$value ;;
  --stages) stages=$value ;;
  --input) inputs+=("$value") ;;
  --tokenizer) tokenizer=$value ;;
  --data) data=$value ;;
  --pack) pack+=("$value") ;;
  --export) export+=("$value") ;;
  --evaluate) evaluate+=("$value") ;;
  --nodes) WM_NODES=$value ;;
  --gpus-per-node) WM_GPUS_PER_NODE=$value ;;
  --time) WM_TRAIN_TIME=$value ;;
  --list) list=$value ;;
  --dry-run) dry=1 ;;
  --help | -h)
    usage
    exit 0
    ;;
  *) refuse "unknown option $option; slurm/submit.sh --help lists them" ;;
  esac
  shift "$taken"
done

job='%j' array=() condition=afterok alone=singleton
if [ -n "$list" ]; then
  if [ $# -gt 0 ] || [ -n "$run$stages" ]; then
    refuse "--list stands in the place of CONFIG, key=value, --run and --stages"
  fi
  [ -s "$list" ] || refuse "no such list, or an empty one: $list"
  list=$(realpath -- "$list")
  set -- "$list"
  run=${list%.*}.jobs stages=train,evaluate evaluate=(--list "$list")
  # Each task's evaluation waits for its own training. Tasks have one name: they must not wait for each other.
  job='%A_%a' array=("--array=0-$(($(wc -l <"$list") - 1))") condition=aftercorr alone=''
fi
[ $# -ge 1 ] || refuse "no CONFIG given; slurm/submit.sh --help shows the usage"
config=$1
shift
[ -r "$config" ] || refuse "no such config: $config"
for setting in "$@"; do
  [[ $setting == *=* ]] || refuse "'$setting' is no key=value; options come before CONFIG"
  [[ $setting != run.dir=* ]] || refuse "give the run directory by --run and not by run.dir="
done
name=$(basename "${config%.*}")
run=$(realpath -m -- "${run:-runs/$name}")
data=$(realpath -m -- "${data:-data/$name}")
[ -n "$stages" ] || stages=${inputs:+pack,}train,export,evaluate
for stage in ${stages//,/ }; do
  [[ $stage =~ ^(pack|train|export|evaluate)$ ]] || refuse "unknown stage '$stage'; there are pack, train, export, evaluate"
done
wanted() { [[ ,$stages, == *,$1,* ]]; }
if wanted pack; then
  [ "${#inputs[@]}" -gt 0 ] || refuse "the stage pack needs --input"
  [ -n "$tokenizer" ] || refuse "the stage pack needs --tokenizer"
  set -- "$@" "data.train=$data"
fi
[[ $WM_NODES =~ ^[1-9][0-9]*$ ]] || refuse "--nodes is '$WM_NODES', must be 1 or more"
[[ $WM_GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] || refuse "--gpus-per-node is '$WM_GPUS_PER_NODE', must be 1 or more"
[ "${#evaluate[@]}" -gt 0 ] || evaluate=(perplexity "$run")

# Lists and patterns: SLURM, srun and pyxis read the paths that they are given, and know no way to quote some characters.
newline=$'\n'
for path in "$PWD" "$run" "$data"; do
  [[ $path != *\\* && $path != *"$newline"* ]] || refuse "the path '$path' holds a backslash or a line break, which SLURM cannot write to"
done
[ -z "$WM_CONTAINER_IMAGE" ] || [[ $PWD != *[:,]* ]] || refuse "a container cannot mount '$PWD': its name holds a comma or a colon"
pattern=${run//%/%%} # in the name of a log file % begins a pattern
if wanted train; then
  limit=$(wm_seconds "$WM_TRAIN_TIME") || refuse "--time is '$WM_TRAIN_TIME', must be as for sbatch: MINUTES, HH:MM:SS or DAYS-HH:MM:SS"
  [ "$limit" = 0 ] || [ "$limit" -gt "$((WM_GRACE_SECONDS + 60))" ] || refuse "--time $WM_TRAIN_TIME leaves no time to train:" \
    "the job is asked to stop WM_GRACE_SECONDS = $WM_GRACE_SECONDS seconds before it; more than a minute must be left"
fi

# Two training jobs of one run directory never run at the same time: `singleton` goes by the job's name.
export WM_REPO=$PWD # in the environment: --export is a list, and a comma in the path would end an item
label=$name-$(cksum <<<"$run" | cut -c1-6)
after='' # the job that the next one waits for

submit() { # submit WORD sbatch-options-and-script…: prints the command, and submits it unless it is a dry run
  local word=$1 id
  shift
  local command=(sbatch --parsable --export=ALL)
  [ -z "$WM_ACCOUNT" ] || command+=("--account=$WM_ACCOUNT")
  [ -z "$WM_QOS" ] || command+=("--qos=$WM_QOS")
  local extra
  read -ra extra <<<"$WM_SBATCH_EXTRA"
  command+=("${extra[@]}" "$@")
  if [ -n "$dry" ]; then
    local word_list='' part
    for part in "${command[@]}"; do
      [[ $part =~ ^[][A-Za-z0-9_./:=,@%+\<\>-]+$ ]] || part=$(printf %q "$part")
      word_list+="$part "
    done
    echo "${word_list% }"
    after="<$word>"
    return
  fi
  id=$("${command[@]}")
  after=${id%%;*}
  printf '%-9s job %s\n' "$word" "$after"
}
waiting() { # the dependency options for a job that comes next; $1: a further condition
  local conditions=${after:+$condition:$after}
  [ -z "${1-}" ] || conditions=${conditions:+$conditions,}$1
  [ -z "$conditions" ] || printf '%s\n' "--dependency=$conditions" --kill-on-invalid-dep=yes
}
cpu=(--cpus-per-task="$WM_CPU_CPUS" --mem="$WM_CPU_MEMORY" --time="$WM_CPU_TIME")
[ -z "$WM_CPU_PARTITION" ] || cpu+=(--partition="$WM_CPU_PARTITION")
gpu=(--cpus-per-task="$WM_CPUS_PER_GPU")
[ -z "$WM_PARTITION" ] || gpu+=(--partition="$WM_PARTITION")
[ -z "$WM_CONSTRAINT" ] || gpu+=(--constraint="$WM_CONSTRAINT")

[ -n "$dry" ] || mkdir -p "$run/logs"
if wanted pack; then
  submit pack "${cpu[@]}" --job-name="pack-$label" --array="0-$((WM_SLICES - 1))" --output="$pattern/logs/pack-%A_%a.log" \
    slurm/tokenize.sbatch "$WM_SLICES" --input "${inputs[@]}" --tokenizer "$tokenizer" --output "$data" "${pack[@]}"
  mapfile -t wait_for < <(waiting)
  submit merge "${wait_for[@]}" "${cpu[@]}" --job-name="merge-$label" --output="$pattern/logs/merge-%j.log" \
    slurm/tokenize.sbatch merge "$data"
fi
if wanted train; then
  mapfile -t wait_for < <(waiting "$alone")
  trained=("$config" "$run" "$@")
  [ -z "$list" ] || trained=(--list "$list")
  submit train "${wait_for[@]}" "${array[@]}" "${gpu[@]}" --job-name="train-$label" --output="$pattern/logs/train-$job.log" \
    --nodes="$WM_NODES" --ntasks-per-node="$WM_GPUS_PER_NODE" --gpus-per-node="$WM_GPUS_PER_NODE" ${WM_EXCLUSIVE:+--exclusive} \
    --time="$WM_TRAIN_TIME" --signal="B:USR1@$WM_GRACE_SECONDS" slurm/pretrain.sbatch "${trained[@]}"
fi
if wanted export; then
  mapfile -t wait_for < <(waiting)
  submit export "${wait_for[@]}" "${cpu[@]}" --job-name="export-$label" --output="$pattern/logs/export-%j.log" \
    slurm/export.sbatch "$run" --output "$run/export" "${export[@]}"
fi
if wanted evaluate; then
  mapfile -t wait_for < <(waiting)
  submit evaluate "${wait_for[@]}" "${array[@]}" "${gpu[@]}" --job-name="evaluate-$label" --output="$pattern/logs/evaluate-$job.log" \
    --gpus-per-node=1 --time="$WM_CPU_TIME" slurm/evaluate.sbatch "${evaluate[@]}"
fi
if [ -z "$dry" ]; then
  echo "logs: $run/logs    all of it: squeue --me    stop and keep: touch $(printf %q "$run/STOP")"
fi
