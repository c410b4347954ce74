#!/usr/bin/env bash
# The first process of a machine sets it up, starts its daemons, and waits for whom they leave behind:
#
#     boot.sh DIR REPO NAME ADDRESS INTERFACE
set -eu
folder=$1 repo=$2 name=$3 address=$4 interface=$5
hostname "$name"

# Each machine has these folders to itself, and in them again what all machines share. All else of the host's disk is
# read by all, as an image of the system is.
exec 8<"$folder" 9<"$repo"
for own in /tmp /var/tmp /run /dev/shm /etc/slurm; do
  if [ -d $own ]; then mount -t tmpfs -o mode=1777 none $own; fi
done
mkdir -p "$folder" "$repo"
mount --no-canonicalize --rbind /proc/self/fd/8 "$folder"
mount --no-canonicalize --rbind /proc/self/fd/9 "$repo"
exec 8<&- 9<&-
chmod 755 /run
mount --bind "$folder/hosts" /etc/hosts
ln -s "$folder"/*.conf /etc/slurm/

ip link set lo up
until ip link show "$interface" >/dev/null 2>&1; do sleep 0.1; done
ip address add "$address/24" dev "$interface"
ip link set "$interface" up

start() {
  setsid "$@" </dev/null >>"$folder/logs/$1-$name.log" 2>&1 &
}
mkdir -p /run/munge /run/slurmctld
# --force: key and folders belong to root
start munged --foreground --force --seed-file=/run/munge/seed --log-file=/run/munge/log --key-file="$folder/munge.key"
until [ -S /run/munge/munge.socket.2 ]; do sleep 0.1; done
if [ "$name" = login ]; then
  start slurmctld -D
else
  start slurmd -D -N "$name"
fi
while sleep 1; do :; done
