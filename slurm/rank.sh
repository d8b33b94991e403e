#!/usr/bin/env bash
# One rank, started by srun: turns SLURM's variables into those that torch and DeepSpeed read, runs the program,
# and notes a failure that the program itself could not (a kill, an import error).
set -u

# All of it in a function: bash reads a script as it goes, and this one may be replaced while it runs.
main() {
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  LOCAL_WORLD_SIZE=$("$1" -m wm_ds.run.rendezvous local-tasks) || exit 1
  export LOCAL_WORLD_SIZE

  # The step that the rank works on, in the node's memory: it can still be read when the rank has been killed.
  progress=/dev/shm/wm_ds.${SLURM_JOB_ID}.${WM_ATTEMPT:-0}.$RANK
  [ -w /dev/shm ] || progress=/tmp/${progress##*/}
  export WM_PROGRESS_FILE=$progress

  # A signal before the trainer has its handlers must not kill it; the batch script repeats USR1 until it is heard.
  # SLURM sends every signal to this shell as well, which has to outlive them.
  trap '' USR1 USR2 TERM
  "$@"
  code=$?

  if [ "$code" -ne 0 ] && [ -n "${WM_ATTEMPT:-}" ]; then
    # A rank that ends because another was killed must not be noted before that one; watchdog.py waits
    # longer, so that a rank that ends by itself is noted before those that lose it.
    [ "$code" -gt 128 ] || sleep 1.5
    step=$(tr -dc 0-9 2>/dev/null <"$progress") || step=
    kind="exited"
    [ "$code" -le 128 ] || kind="killed by SIG$(kill -l "$code" 2>/dev/null)"
    # noclobber: only the first record of an attempt is kept
    (
      set -C
      printf '{"rank": %d, "node": "%s", "kind": "%s", "exit_code": %d, "step": %s}\n' \
        "$RANK" "${SLURMD_NODENAME:-$(hostname)}" "$kind" "$code" "${step:-null}" >"$WM_ATTEMPT_PATH.failure"
    ) 2>/dev/null
    printf 'rank %d %s, exit code %d\n' "$RANK" "$kind" "$code" >&2
  fi
  rm -f "$progress"
  exit "$code"
}

main "$@"
