#!/usr/bin/env bash
# RLHF from nothing, on the embedded world: data -> base -> SFT -> reward model -> PPO -> report.
#
#   bash benchmark/quickstart.sh                  seed 44413
#   SEED=55513 bash benchmark/quickstart.sh       another seed, on the same world and base model
#   SIZE=medium OUT=benchmark/out_medium bash benchmark/quickstart.sh   3M parameters, about three times as long
#   SIZE=tiny OUT=benchmark/out_tiny bash benchmark/quickstart.sh       50k, which never learn to copy: PPO over-optimises
#
# Everything goes to $OUT (benchmark/out); finished stages are not run again, and one that was interrupted goes on from
# its last checkpoint, so the call can be repeated.
set -euo pipefail
source "$(dirname "$0")/common.sh"

WORLD=$OUT/world
stage world "$WORLD/world.json" benchmark/synthetic.py --output_dir "$WORLD" --seed 1 --size "${SIZE:-small}"
if ! grep -q "\"size\": \"${SIZE:-small}\"" "$WORLD/world.json"; then
  echo "$OUT holds a run of another SIZE than ${SIZE:-small}; give each size an OUT of its own"
  exit 1
fi
for part in pretrain sft; do
  [[ $part == sft ]] && comparisons=$WORLD/comparisons || comparisons=""
  stage "tokenise_$part" "$OUT/data_$part/run.json" tldr_dataset.py --sft "$WORLD/$part" --comparisons "$comparisons" \
    --tokenizer "$WORLD/tokenizer" --max_query_length 144 --output_dir "$OUT/data_$part"
done
posts=$OUT/data_sft/sft pairs=$OUT/data_sft/comparisons sft=$OUT/sft_$SEED
train base --model "$WORLD/init" --dataset "$OUT/data_pretrain/sft" --batch_size 32 --max_updates 450 --lr 3e-3 \
  --loss_on response --response_length 48 --eval_rows 64
train sft --model "$OUT/base" --dataset "$posts" --seed "$SEED" --batch_size 32 --max_updates 100 --lr 5e-4 \
  --loss_on response --response_length 48
train reward --sft_model "$sft" --dataset "$pairs" --sft_dataset "$posts" --seed "$SEED" --batch_size 32 --num_epochs 1.25 \
  --lr 7e-4 --normalisation_rows 1000
MICRO_BATCH=16 train ppo --sft_model "$sft" --reward_model "$OUT/reward_$SEED" --dataset "$posts" --seed "$SEED" \
  --batch_size 64 --num_ppo_epochs 1 --num_minibatches 4 --total_episodes 4096 --lr 1e-4 --response_length 48
OMP_NUM_THREADS=$PROCESSES "$PYTHON" benchmark/report.py --folder "$OUT" --seed "$SEED"
