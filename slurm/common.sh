# shellcheck shell=bash
# What the batch scripts share. Sourced, after slurm/env.sh, from the repository's root.

# The name by which SLURM requeues and shows this job: array tasks have one of their own.
wm_job() {
  if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    echo "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
  else
    echo "${SLURM_JOB_ID:-none}"
  fi
}

say() { printf '%s job %s: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(wm_job)" "$*"; }

die() { # die CODE TEXT
  say "error: $2" >&2
  exit "$1"
}

# Seconds of a time limit as sbatch takes it (MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS); 0: no limit.
wm_seconds() {
  local days=0 rest=$1 parts
  case $1 in
  UNLIMITED | INFINITE | infinite | unlimited | 0) echo 0 && return ;;
  *-*) days=${1%%-*} rest=${1#*-} ;;
  esac
  [[ $days =~ ^[0-9]+$ && $rest =~ ^[0-9]+(:[0-9]+){0,2}$ ]] || return 1
  IFS=: read -ra parts <<<"$rest"
  case $1 in
  *-*) parts+=(0 0) ;;                           # D-HH[:MM[:SS]]
  *:*:*) ;;                                      # HH:MM:SS
  *) parts=(0 "${parts[0]}" "${parts[1]:-0}") ;; # MM[:SS]
  esac
  echo $((10#$days * 86400 + 10#${parts[0]} * 3600 + 10#${parts[1]} * 60 + 10#${parts[2]}))
}

# The columns of this array task's line in a list of runs: configuration, run directory, file and settings of what is
# measured of it. In the array `task`.
wm_task() {
  local line
  line=$(sed -n "$((${SLURM_ARRAY_TASK_ID:?a list of runs is for an array of jobs} + 1))p" "$1")
  IFS=$'\t' read -ra task <<<"$line"
  [ "${#task[@]}" -eq 4 ] || die 2 "line $((SLURM_ARRAY_TASK_ID + 1)) of $1 is no run"
}

# srun's options for the container, one a line; none where no image is set.
wm_container_options() {
  [ -n "$WM_CONTAINER_IMAGE" ] || return 0
  printf '%s\n' "--container-image=$WM_CONTAINER_IMAGE" "--container-workdir=$PWD" \
    "--container-mounts=$PWD:$PWD${WM_CONTAINER_MOUNTS:+,$WM_CONTAINER_MOUNTS}"
}

# srun of one task in the environment of the ranks: for the jobs that are a single process.
wm_run_one() {
  local options
  mapfile -t options < <(wm_container_options)
  SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" srun --nodes=1 --ntasks=1 "${options[@]}" "$@"
}

# Submits the evaluation that the trainer of WM_RUN_DIR wants (evaluate.tasks), unless one is in the queue: the job takes
# the newest checkpoint that is wanted when it starts. Says what it did; a refusal is said once, and training goes on.
wm_tasks_refused=''
wm_submit_tasks() {
  local name options=() answer
  [ -e "$WM_RUN_DIR/evaluations/wanted.json" ] || return 0
  name=tasks-$(cksum <<<"$WM_RUN_DIR" | cut -c1-6)
  answer=$(squeue --noheader --me --name="$name" --format=%i 2>/dev/null) || return 0 # no answer: next time
  [ -z "$answer" ] || return 0
  if [ "$WM_TASKS_GPUS" -gt 0 ]; then
    options=(--gpus-per-node="$WM_TASKS_GPUS" --cpus-per-task="$WM_CPUS_PER_GPU")
    [ -z "$WM_PARTITION" ] || options+=(--partition="$WM_PARTITION")
    [ -z "$WM_CONSTRAINT" ] || options+=(--constraint="$WM_CONSTRAINT")
  else
    options=(--cpus-per-task="$WM_CPU_CPUS" --mem="$WM_CPU_MEMORY")
    [ -z "$WM_CPU_PARTITION" ] || options+=(--partition="$WM_CPU_PARTITION")
  fi
  [ -z "$WM_ACCOUNT" ] || options+=(--account="$WM_ACCOUNT")
  [ -z "$WM_QOS" ] || options+=(--qos="$WM_QOS")
  if answer=$(sbatch --parsable --export=ALL --job-name="$name" --dependency=singleton --time="$WM_CPU_TIME" \
    --output="${WM_RUN_DIR//%/%%}/logs/tasks-%j.log" "${options[@]}" slurm/evaluate.sbatch on-the-way "$WM_RUN_DIR" 2>&1); then
    wm_tasks_refused=''
    say "evaluate.tasks: job ${answer%%;*}"
  elif [ "$wm_tasks_refused" != "$answer" ]; then
    wm_tasks_refused=$answer
    say "evaluate.tasks: SLURM takes no job for it ($answer); training goes on, asked again every $WM_TASKS_POLL s"
  fi
}

# State and number of restarts of this job as SLURM sees them now: `RUNNING 2`. A controller that restarts is
# given a minute; empty when it does not answer.
wm_job_state() {
  local shown try
  for try in 1 2 3 4 5 6; do
    if shown=$(scontrol show job -o "$(wm_job)" 2>/dev/null) && [ -n "$shown" ]; then
      sed -nE '1s/.* JobState=([A-Z_]+) .* Restarts=([0-9]+) .*/\1 \2/p' <<<"$shown"
      return 0
    fi
    [ "$try" = 6 ] || sleep 10
  done
  return 0
}
