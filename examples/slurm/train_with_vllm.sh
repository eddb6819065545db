#!/usr/bin/env bash
# Trainer nodes and one vLLM node: sbatch examples/slurm/train_with_vllm.sh run.yaml
# The last node of the job serves; the others train. run.yaml names the model, the data and the rewards.
#SBATCH --job-name=groupwise
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
set -euo pipefail

run=${1:?usage: sbatch train_with_vllm.sh run.yaml}
port=8000
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
server=${nodes[-1]}
trainers=("${nodes[@]:0:${#nodes[@]}-1}")

# The trainers are on other nodes, so the server listens on all addresses of its own. Whoever reaches it can replace
# the weights: the port must be closed outside of the cluster.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$server" \
    groupwise vllm-serve --config "$run" --host 0.0.0.0 --port "$port" --tensor_parallel_size 8 &
serving=$!
trap 'kill "$serving" 2>/dev/null || true' EXIT

# In single quotes: SLURM_PROCID is another one on every node.
srun --overlap --nodes="${#trainers[@]}" --ntasks="${#trainers[@]}" --nodelist="$(IFS=,; echo "${trainers[*]}")" \
    bash -c 'accelerate launch --config_file examples/accelerate/zero3.yaml \
        --num_machines "$0" --num_processes "$(($0 * 8))" --machine_rank "$SLURM_PROCID" \
        --main_process_ip "$1" --main_process_port 29500 \
        -m groupwise.cli train --config "$2" \
        --use_vllm true --vllm_mode server --vllm_server_host "$3" --vllm_server_port "$4"' \
    "${#trainers[@]}" "${trainers[0]}" "$run" "$server" "$port"
