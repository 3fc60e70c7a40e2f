# Sourced by the shell scripts, from the repository's root: the virtual environment $VENV (.venv), made where it is not
# there or older than requirements.txt, and settings for small machines without a Hub.
VENV=${VENV:-.venv}
PYTHON=$VENV/bin/python
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
if ! cmp -s requirements.txt "$VENV/requirements.txt"; then
  python3 -m venv "$VENV"
  # most modules are never imported; those that are get compiled then, and once
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
  cp requirements.txt "$VENV/requirements.txt"
fi
unset PYTHONDONTWRITEBYTECODE  # or every process would compile them anew
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # models of this size gain from a second process, not from a second thread
# glibc hands large tensors back to the system at every step unless it is told not to
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864
