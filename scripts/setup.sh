#!/usr/bin/env bash
# Install the packages that LIST pins, and this repository, into the virtual environment VENV.
# scripts/setup.sh VENV LIST [BACKEND]: BACKEND names another build of PyTorch than PyPI's, as `uv pip --torch-backend`
# does (cpu, cu126, rocm7.0, auto ...). VENV keeps to it until it is removed.
# PACKAGE=FILE.whl installs that wheel in place of this repository.
set -euo pipefail
venv=$1 list=$2 backend=${3:-}
python=${PYTHON:-python3}
log=$venv/setup.log

fail() {
  echo "setup: $1" >&2
  exit 2
}

# Show how far it is on one line of a terminal; the log has everything.
follow() {
  tee -a "$log" | if [[ -t 2 ]]; then
    awk '/^ *(Collecting|Downloading|Downloaded|Installing|Installed|Prepared) / {
        printf "\r\033[K  %.70s", $0 > "/dev/stderr"; fflush()}
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
  if grep -qiE 'hash mismatch|do not match the hashes' "$log"; then
    echo "Hash mismatch for$(grep -oE '[ `][A-Za-z0-9._-]+==[A-Za-z0-9._]+' "$log" | tail -1 | tr '`' ' ')"
  else
    { grep -E '^(ERROR|error| *cause|[A-Za-z]+Error):' "$log" || tail -1 "$log"; } | tail -1 | sed -E 's/^ *[a-zA-Z]+: //'
  fi
}

with_pip() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile --no-deps "$@"
}

# A list names every package with its hashes, so nothing is left to resolve and each file is checked. uv does not read
# pip's own settings: where only pip reaches an index, pip installs.
install() {
  "$uv" pip install --python "$venv/bin/python" --no-deps "$@" || with_pip "$@"
}

# The pins of the packages whose names match a regular expression, or of the others with `!=`. The line of a package
# is followed by indented ones with its hashes.
pins() {
  awk -v names="^($3)" -v matches="$([[ $2 == = ]] && echo 1 || echo 0)" \
    '/^[^ ]/ {shown = ($0 ~ names) == matches} shown' "$1"
}

bring_uv() {
  pins constraints-dev.txt = 'uv==' >"$venv/uv.txt"
  with_pip --require-hashes -r "$venv/uv.txt"
}

# PyTorch's own index serves its builds; their hashes are not in the list.
another_torch() {
  pins "$list" != '(torch|torchvision|triton)==|cuda-|nvidia-' >"$venv/pins.txt"
  [[ $backend == cpu || $backend == rocm* ]] || pins "$list" = nvidia-nvimgcodec >>"$venv/pins.txt"
  install --require-hashes -r "$venv/pins.txt" &&
    "$uv" pip install --python "$venv/bin/python" --torch-backend "$backend" \
      $(pins "$list" = '(torch|torchvision)==' | grep -oE '^[a-z]+==[^ ]+')
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "Python 3.11 or newer is needed, $python is $("$python" --version 2>&1); try: make PYTHON=python3.12"
[[ -n $backend || ! -e $venv/torch ]] || backend=$(<"$venv/torch")
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 | cut -d. -f1 || true)
[[ -n $backend || ! $driver =~ ^[0-9]+$ || $driver -ge 580 ]] ||
  fail "the NVIDIA driver $driver is older than the 580 that CUDA 13 needs; TORCH=auto takes PyTorch for this driver"

# `activate` is what venv writes last: without it an earlier try was cut short.
[[ -e $venv/bin/activate || -d $venv/conda-meta ]] || "$python" -m venv "$venv" || fail "cannot create $venv"
: >"$log"
if ! uv=$(command -v uv); then
  uv=$venv/bin/uv
  [[ -x $uv ]] || step "uv, which installs the rest" bring_uv
fi

count=$(grep -c '^[a-zA-Z].*==' "$list")
if [[ -n $backend ]]; then
  step "$count packages in their pinned versions, PyTorch for $backend ($log)" another_torch
else
  step "$count packages in their pinned versions, PyTorch with CUDA ($log)" install --require-hashes -r "$list"
fi
echo "$backend" >"$venv/torch"
[[ -n ${PACKAGE:-} || $list == constraints.txt ]] || exit 0  # what comes beside it later finds it installed
step "${PACKAGE:-this repository}" install ${PACKAGE:---no-build-isolation --editable .}
# The first start compiles what it imports. Here it is kept, for containers and for users who write no bytecode later.
step "bytecode" env PYTHONDONTWRITEBYTECODE= "$venv/bin/python" -c \
  "import cait.cli.lightning, matplotlib.pyplot, sklearn.datasets, torch.utils.tensorboard"
