#!/usr/bin/env bash
# Several hosts with eight GPUs each under Slurm, one process per host. launch/step.sh lists the variables.
#
#   DATA=/shared/msmarco WORKDIR=/shared/runs/mlr sbatch launch/slurm.sh [more flags of jaxret train]
#
# Submit it from the repository's folder, which every host must see. If a job ended early, the same command continues it.
#SBATCH --job-name=jaxret
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=jaxret-%j.log
set -euo pipefail
# Slurm runs a copy of this file in another folder.
cd "${SLURM_SUBMIT_DIR:?sbatch sets it}"
export PLATFORM=${PLATFORM:-gpu} COORDINATOR=auto CHECKPOINT_EVERY=${CHECKPOINT_EVERY:-500}

# Since Slurm 22.05, srun ignores --cpus-per-task of sbatch; with one core, tokenizing is slow.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}

# --signal above: the steps get SIGTERM 180 s before the time limit, so that training saves its current step.
# --kill-on-bad-exit: if one process ends with an error, the others need not wait for its heartbeat.
launch() {
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q ' srun "$@"
        echo
    else
        srun "$@"
    fi
}
launch --kill-on-bad-exit=1 launch/step.sh train "$@"
launch --kill-on-bad-exit=1 launch/step.sh encode
launch --kill-on-bad-exit=1 launch/step.sh search
