#!/usr/bin/env bash
# Trainer nodes and vLLM nodes: sbatch examples/slurm/train_with_vllm.sh run.yaml
# The last SERVERS nodes of the job serve; the others train. run.yaml names the model, the data, the rewards and an
# output_dir on a file system that all nodes share. Four numbers to change: nodes, GPUs of a node, hours, SERVERS.
#SBATCH --nodes=3
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --job-name=groupwise
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
# Ten minutes before the time ends the job is put back into the queue, as after a preemption.
#SBATCH --signal=B:USR1@600
set -euo pipefail

SERVERS=1
run=${1:?usage: sbatch train_with_vllm.sh run.yaml}
gpus=${SLURM_GPUS_PER_NODE:-8} port=8000
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=$((${#nodes[@]} - SERVERS))
((count > 0)) || { echo "SERVERS=$SERVERS leaves none of ${#nodes[@]} nodes to train" >&2; exit 2; }
trainers=("${nodes[@]:0:count}") servers=("${nodes[@]:count}")
urls=$(printf ",http://%s:$port" "${servers[@]}")
join() { local IFS=,; echo "$*"; }

# The trainers are on other nodes, so a server listens on all addresses of its own. Whoever reaches it can replace
# the weights: the port must be closed outside of the cluster.
srun --overlap --nodes="$SERVERS" --ntasks="$SERVERS" --nodelist="$(join "${servers[@]}")" \
    groupwise vllm-serve --config "$run" --host 0.0.0.0 --port "$port" --tensor_parallel_size "$gpus" &
serving=$!
trap 'kill "$serving" 2>/dev/null || true' EXIT

# A job that starts again resumes, and repeats the steps after its last checkpoint (save_steps).
resume=()
output=$(python3 -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["output_dir"])' "$run")
if ((${SLURM_RESTART_COUNT:-0} > 0)) && compgen -G "$output/checkpoint-*" >/dev/null; then
    resume=(--resume_from_checkpoint true)
fi

# In single quotes: SLURM_PROCID is another one on every node.
srun --overlap --nodes="$count" --ntasks="$count" --nodelist="$(join "${trainers[@]}")" \
    bash -c 'groupwise train --accelerate_config zero3 --num_machines "$0" --num_processes "$(($0 * $1))" \
        --machine_rank "$SLURM_PROCID" --main_process_ip "$2" --main_process_port 29500 "${@:3}"' \
    "$count" "$gpus" "${trainers[0]}" --config "$run" "${resume[@]}" \
    --use_vllm true --vllm_mode server --vllm_server_base_url "${urls:1}" &
training=$!
requeue() {
    kill -TERM "$training"
    wait "$training" || true
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1
wait "$training"
