#!/usr/bin/env bash
# RLHF from nothing, on the embedded world: data -> base -> SFT -> reward model -> PPO -> report.
#
#   bash benchmark/quickstart.sh                  seed 44413
#   SEED=55513 bash benchmark/quickstart.sh       another seed, on the same world and base model
#   SIZE=medium OUT=benchmark/out_medium bash benchmark/quickstart.sh   3M parameters, trained longer: about half an hour
#   SIZE=tiny OUT=benchmark/out_tiny bash benchmark/quickstart.sh       50k, which never learn to copy: PPO over-optimises
#
# Everything goes to $OUT (benchmark/out); finished stages are not run again, and one that was interrupted goes on from
# its last checkpoint, so the call can be repeated.
set -euo pipefail
source "$(dirname "$0")/common.sh"

WORLD=$OUT/world
updates=450 epochs=1.25 episodes=4096 base_lr=3e-3 sft_lr=5e-4 reward_lr=7e-4 ppo_lr=1e-4
if [[ ${SIZE:-small} == medium ]]; then  # two thirds of each learning rate, and longer (docs/synthetic.md)
  updates=500 epochs=2 episodes=6400 base_lr=2e-3 sft_lr=3.3e-4 reward_lr=4.7e-4 ppo_lr=6.7e-5
fi
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
train base --model "$WORLD/init" --dataset "$OUT/data_pretrain/sft" --batch_size 32 --max_updates "$updates" --lr "$base_lr" \
  --loss_on response --response_length 48 --eval_rows 64
train sft --model "$OUT/base" --dataset "$posts" --seed "$SEED" --batch_size 32 --max_updates 100 --lr "$sft_lr" \
  --loss_on response --response_length 48
train reward --sft_model "$sft" --dataset "$pairs" --sft_dataset "$posts" --seed "$SEED" --batch_size 32 \
  --num_epochs "$epochs" --lr "$reward_lr" --normalisation_rows 1000
MICRO_BATCH=16 train ppo --sft_model "$sft" --reward_model "$OUT/reward_$SEED" --dataset "$posts" --seed "$SEED" \
  --batch_size 64 --num_ppo_epochs 1 --num_minibatches 4 --total_episodes "$episodes" --lr "$ppo_lr" \
  --response_length 48
OMP_NUM_THREADS=$PROCESSES "$PYTHON" benchmark/report.py --folder "$OUT" --seed "$SEED"
