#!/usr/bin/env bash
# Create the virtual environment VENV and install the pinned packages and this repository into it.
# scripts/setup.sh VENV [cpu]: with cpu PyTorch comes without CUDA, which needs uv. VENV keeps to that until it is removed.
# PACKAGE=FILE.whl installs that wheel in place of this repository.
set -euo pipefail
venv=$1 torch=${2:-}
python=${PYTHON:-python3}
log=$venv/setup.log

fail() {
  echo "setup: $1" >&2
  exit 2
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "Python 3.11 or newer is needed, $python is $("$python" --version 2>&1); try: make PYTHON=python3.12"
uv=$(command -v uv || true)
[[ -n $torch || ! -e $venv/torch ]] || torch=$(<"$venv/torch")  # what an earlier set-up was asked for
[[ -z $torch || $torch == cpu ]] || fail "TORCH=$torch is unknown; TORCH=cpu takes PyTorch without CUDA"
[[ -z $torch || -n $uv ]] || fail "TORCH=cpu needs uv, which knows where PyTorch's builds without CUDA are: pip install uv"

# `activate` is what venv writes last: without it an earlier try was cut short.
[[ -e $venv/bin/activate || -d $venv/conda-meta ]] || "$python" -m venv "$venv" || fail "cannot create $venv"

# All packages are named with their hashes, so nothing is left to resolve and each file is checked.
install() {
  if [[ -n $uv ]]; then
    "$uv" pip install --python "$venv/bin/python" --no-deps "$@"
  else
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile --no-deps "$@"
  fi
}

# Show how far it is on one line of a terminal; the log has everything.
follow() {
  tee -a "$log" | if [[ -t 2 ]]; then
    awk '/^(Collecting|Downloading|Installing)/ {printf "\r\033[K  %.70s", $0 > "/dev/stderr"; fflush()}
      END {printf "\r\033[K" > "/dev/stderr"}'
  else
    cat >/dev/null
  fi
}

step() {
  local words=$1
  shift
  echo "  $words"
  "$@" 2>&1 | follow || fail "$(reason) (all of it: $log)"
}

# What pip or uv says of a failure, in a line.
reason() {
  if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
    echo "Hash mismatch for$(grep -oE '^ +[A-Za-z0-9._-]+==[^ ]+' "$log" | tail -1)" | tr -s ' '
  else
    { grep -E '^(ERROR|error| *cause|[A-Za-z]+Error):' "$log" || tail -1 "$log"; } | tail -1 | sed -E 's/^ *[a-zA-Z]+: //'
  fi
}

without_cuda() {
  local pins=$venv/pins.txt
  # A package's pin is a line of its own, and its hashes are the indented lines behind it.
  awk '/^[^ ]/ {left_out = /^(torch|torchvision|cuda-|nvidia-)/ && !/^nvidia-nvimgcodec/} !left_out' constraints.txt >"$pins"
  # PyTorch's own index serves its builds; their hashes are not in constraints.txt.
  install --require-hashes -r "$pins" &&
    install --torch-backend cpu $(grep -oE '^(torch|torchvision)==[^ ]+' constraints.txt)
}

: >"$log"
count=$(grep -c '^[a-zA-Z].*==' constraints.txt)
if [[ $torch == cpu ]]; then
  step "$count packages in their pinned versions, PyTorch without CUDA ($log)" without_cuda
else
  step "$count packages in their pinned versions, PyTorch with CUDA, 6 GB ($log)" install --require-hashes -r constraints.txt
fi
echo "$torch" >"$venv/torch"
step "${PACKAGE:-this repository}" install ${PACKAGE:---no-build-isolation --editable .}
# The first start compiles what it imports. Here it is kept, for containers and for users who write no bytecode later.
step "bytecode" env PYTHONDONTWRITEBYTECODE= "$venv/bin/python" -c \
  "import cait.cli.lightning, matplotlib.pyplot, sklearn.datasets, torch.utils.tensorboard"
