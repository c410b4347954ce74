#!/usr/bin/env bash
# What an installed package must do in an empty folder: scripts/try_package.sh COMMAND, that of its environment.
set -euo pipefail
cait=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH  # a clone would come first
verbs=$("$cait" --help)
set -x
for verb in zoo paper; do  # of an extra, which may be gone
  ! grep -q "^  $verb " <<<"$verbs" || "$cait" "$verb"
done
"$cait" fit --config base.yaml --config configs/trainer/cpu.yaml --print_config
"$cait" fit --config digits.yaml --config trainer/cpu.yaml --run_name first --trainer.max_steps 4
"$cait" resume first --trainer.max_steps 8
"$cait" eval first
"$cait" predict first data/digits/val/7
