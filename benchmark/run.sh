#!/usr/bin/env bash
# The paper's experiment, and ILQL: sizes x seeds x stages. Finished stages are skipped: the call can be repeated.
#
#   bash benchmark/run.sh                                        the paper's three sizes and four seeds
#   MODELS=pythia-160m SEEDS=44413 bash benchmark/run.sh         one run
#   STAGES="sft reward ppo" bash benchmark/run.sh                without DPO and ILQL
#   LAUNCH="accelerate launch --config_file benchmark/ddp.yaml --num_processes 4" MODELS=pythia-1b bash benchmark/run.sh
#
# bf16 and DeepSpeed ZeRO-2 on 8 GPUs, as in the paper, unless LAUNCH says otherwise. Finished runs keep their last
# checkpoints, some 5 TB in all; nothing needs them any more: rm -r models/*/*/checkpoints
set -euo pipefail
cd "$(dirname "$0")/.."
MODELS=${MODELS:-pythia-1b pythia-2.8b pythia-6.9b}
SEEDS=${SEEDS:-44413 55513 66613 77713}
STAGES=${STAGES:-sft reward ppo dpo ilql}
LAUNCH=${LAUNCH:-accelerate launch --config_file benchmark/zero2.yaml}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}  # micro-batches differ in size
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # seconds to finish an update and save it
for model in $MODELS; do
  for seed in $SEEDS; do
    for stage in $STAGES; do
      folder=models/$(basename "$model")/${stage}_$seed
      if grep -qs '"finished": true' "$folder/run.json"; then
        echo "== $folder: already there"
        continue
      fi
      flags=""
      # Detail 8: at 6.9B the SFT policy and the reward model wait on the CPU while they are not in use
      if [[ $model == *6.9b* || $model == *12b* ]]; then
        [[ $stage == ppo ]] && flags="--offload --micro_batch_size 4"
        [[ $stage == dpo || $stage == ilql ]] && flags="--micro_batch_size 4"
      fi
      echo "== $folder"
      $LAUNCH "$stage.py" --model "$model" --seed "$seed" $flags
    done
  done
done
python benchmark/results.py --folder models
