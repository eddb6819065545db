#!/usr/bin/env bash
# Trainer nodes and vLLM nodes: sbatch examples/slurm/train_with_vllm.sh run.yaml
# The last SERVERS nodes of the job serve; the others train. run.yaml names the model, the data, the rewards and an
# output_dir on a file system that all nodes share. Numbers to change: nodes, GPUs of a node, hours, SERVERS, and
# TENSOR_PARALLEL, by which the model's attention heads must divide (28 of Qwen2.5-7B: 4, not 8).
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
TENSOR_PARALLEL=4  # GPUs of one copy of the model; a node serves gpus / TENSOR_PARALLEL copies
SERVER_TIMEOUT=1800  # seconds in which a server loads its weights
run=${1:?usage: sbatch train_with_vllm.sh run.yaml}
gpus=${SLURM_GPUS_PER_NODE:-8} port=8000
# What many clusters need, on every node:
# source /shared/venv/bin/activate          # the environment, on a file system that all nodes share
# export HF_HOME=/shared/huggingface        # models and data, downloaded on the login node
# export HF_HUB_OFFLINE=1                   # compute nodes without internet
# export NCCL_SOCKET_IFNAME=ib0             # the network between the nodes, as `ip addr` names it
# Ports between the nodes: 8000 (server), 29500 (trainers), 51216 (weights).
export VLLM_API_KEY=${VLLM_API_KEY:-$(python3 -c 'import secrets; print(secrets.token_hex(16))')}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=$((${#nodes[@]} - SERVERS))
((count > 0)) || { echo "SERVERS=$SERVERS leaves none of ${#nodes[@]} nodes to train; ask for more (sbatch --nodes=N)" >&2; exit 2; }
trainers=("${nodes[@]:0:count}") servers=("${nodes[@]:count}")
urls=$(printf ",http://%s:$port" "${servers[@]}")
join() { local IFS=,; echo "$*"; }

# The trainers are on other nodes, so a server listens on all addresses of its own. Who has the key can replace the
# weights.
srun --overlap --nodes="$SERVERS" --ntasks="$SERVERS" --nodelist="$(join "${servers[@]}")" \
    groupwise vllm-serve --config "$run" --host 0.0.0.0 --port "$port" --tensor_parallel_size "$TENSOR_PARALLEL" \
    --data_parallel_size "$((gpus / TENSOR_PARALLEL))" &
serving=$!
trap 'kill "$serving" 2>/dev/null || true' EXIT

# Training begins when every server has loaded its weights. vllm_server_timeout of the run is for servers that stall.
for server in "${servers[@]}"; do
    # shellcheck disable=SC2016 # expanded by the inner shell
    timeout "$SERVER_TIMEOUT" bash -c 'until curl -sf "http://$0:$1/health"; do sleep 5; done' "$server" "$port" ||
        { echo "no server on $server after $SERVER_TIMEOUT s" >&2; exit 1; }
done

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
