#!/bin/bash
# Written by fullframe launch; to submit it by hand: sbatch job.sh, in this folder.
#SBATCH --job-name=pro_ject
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --partition=a100
#SBATCH --account=team
#SBATCH --signal=USR1@120
#SBATCH --dependency=afterok:4711
#SBATCH --requeue
#SBATCH --mem=256G
#SBATCH --exclusive

cd -- '/home/me/pro ject' || exit 1
folder='/home/me/pro ject/runs/two nodes'

run=$folder
values=()

# Slurm's signals are for the ranks, which write a checkpoint; this script waits for them.
trap : TERM USR1
step() { tail -c 65536 "$run/metrics.jsonl" 2>/dev/null | grep -o '"step": [0-9]*' | tail -n 1; }
before=$(step)
srun --kill-on-bad-exit=0 --cpus-per-task=32 /usr/bin/python3 -m fullframe.cli train \
    recipe.py \
    --processes 4 \
    --min-nodes 1 \
    --width 4 \
    --recompute blocks \
    --nodes 2 --run-dir "$run" --auto-resume --stopped-code 85 "${values[@]}"
code=$?

# 85: stopped so that it can go on; 75: the machine failed. Unless someone cancelled the job,
# it is queued again, 100 times at most, and not once 3 in a row gained no step.
vain=0
if [ "$(step)" != "$before" ]; then
    rm -f "$run/in_vain"
elif [ $code = 75 ]; then
    vain=$(($(cat "$run/in_vain" 2>/dev/null || echo 0) + 1))
    { echo $((vain % 3)) > "$run/in_vain"; } 2>/dev/null
fi
case $code in 75 | 85 | 138 | 143)
    if [ $vain -ge 3 ]; then
        echo "error: 3 starts in a row have gained no step; the job is not queued again" >&2
    elif [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] &&
        scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
        scontrol requeue "$SLURM_JOB_ID" && sleep 60
    fi ;;
esac
exit $code
