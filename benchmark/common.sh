# Sourced by quickstart.sh and compare.sh: the environment, `stage` and `train`.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SEED=${SEED:-44413}
OUT=${OUT:-benchmark/out}
PROCESSES=${PROCESSES:-2}
case $PROCESSES in 1 | 2 | 4 | 8 | 16) ;; *)
  echo "PROCESSES: expected a divisor of 16, the rows of a step of PPO; found $PROCESSES"
  return 1
  ;;
esac
source benchmark/environment.sh
export ACCELERATE_USE_CPU=true TRANSFORMERS_VERBOSITY=error
mkdir -p "$OUT"

# note NAME START: append the seconds of a stage since START; those of an interrupted one and of its second part add up
note() {
  echo "$1,$((SECONDS - $2))" >> "$OUT/seconds_$SEED.csv"
}

# stage NAME MARK COMMAND...: run the command unless the file MARK says that it has finished; note its seconds
stage() {
  local name=$1 mark=$2 start=$SECONDS status=0
  shift 2
  if [[ -f $mark ]] && { [[ $mark != *run.json ]] || grep -q '"finished": true' "$mark"; }; then
    echo "== $name: already there"
    return
  fi
  echo "== $name"
  trap "note $name $start" EXIT  # a signal ends the shell, too
  "$PYTHON" "$@" || status=$?
  trap - EXIT
  note "$name" "$start"
  return $status
}

# train NAME ARGUMENTS...: the script of that stage on $PROCESSES processes, into its folder, a checkpoint every minute;
# $MICRO_BATCH rows (32) at a time, over all processes
train() {
  local name=$1 script=$1 folder=$OUT/$1_$SEED
  shift
  [[ $name == base ]] && script=sft folder=$OUT/base
  stage "$name" "$folder/run.json" -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" "$script.py" \
    --output_dir "$folder" --micro_batch_size $((${MICRO_BATCH:-32} / PROCESSES)) --save_minutes 1 "$@"
}
