#!/usr/bin/env bash
# Gemma 4 31B on two GPUs of one machine, with 120 GiB of host memory for its KV cache.
#
# Memory and /dev/shm are those of the plan; ask for another one with
#   python -m scripts.plan_capacity 31b --tp 2 --offloading-size 120
# Beyond the pool, /dev/shm has 8 GiB for NCCL and torch.
set -euo pipefail

image=${VLLM_IMAGE:-gemma4kv/vllm-openai:v0.33.0-gemma4kv.1}

exec docker run --rm --name gemma4 \
  --gpus '"device=0,1"' \
  --memory 144g --memory-swap 144g \
  --shm-size 128g \
  --ulimit memlock=-1 \
  --publish 8000:8000 \
  --volume "$HOME/.cache/huggingface:/huggingface" \
  --env HF_HOME=/huggingface \
  --env HF_TOKEN \
  "$image" \
  "${MODEL:-google/gemma-4-31B-it}" \
  --tensor-parallel-size 2 \
  --max-model-len 32768 \
  --kv-offloading-size 120 \
  "$@"
