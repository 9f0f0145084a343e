#!/usr/bin/env bash
# Gemma 4 31B over two machines with two GPUs each: tensor parallel inside of a machine,
# pipeline parallel between them, on vLLM's own executor. Run it on both:
#
#   HEAD=10.0.0.1 NODE=0 deploy/multi-node.sh     on the machine with that address
#   HEAD=10.0.0.1 NODE=1 deploy/multi-node.sh     on the other
#
# --kv-offloading-size is for all workers together: each machine takes half of it. The pool of
# v0.33.0 is one file, of full length on each machine; only a machine's own part is filled.
#   python -m scripts.plan_capacity 31b --tp 2 --pp 2 --nodes 2 --offloading-size 240
set -euo pipefail

: "${HEAD:?the address of the first machine}" "${NODE:?0 on the first machine, 1 on the other}"
image=${VLLM_IMAGE:-gemma4kv/vllm-openai:v0.33.0-gemma4kv.1}
role=()
if [[ $NODE != 0 ]]; then
  role=(--headless) # the first machine answers requests
fi

exec docker run --rm --name "gemma4-$NODE" \
  --gpus '"device=0,1"' \
  --memory 144g --memory-swap 144g \
  --shm-size 248g \
  --ulimit memlock=-1 \
  --network host \
  --volume "$HOME/.cache/huggingface:/huggingface" \
  --env HF_HOME=/huggingface \
  --env HF_TOKEN \
  "$image" \
  "${MODEL:-google/gemma-4-31B-it}" \
  --nnodes 2 --node-rank "$NODE" --master-addr "$HEAD" \
  --distributed-executor-backend mp \
  --tensor-parallel-size 2 \
  --pipeline-parallel-size 2 \
  --max-model-len 32768 \
  --kv-offloading-size 240 \
  "${role[@]}" \
  "$@"
