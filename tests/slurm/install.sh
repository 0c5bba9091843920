#!/usr/bin/env bash
# Packages of the Slurm that tests/test_slurm.py starts (Debian, Ubuntu; as root). `make slurm-fixture`.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge libslurm-dev gcc iproute2 procps)
if ! command -v apt-get >/dev/null || ((EUID)); then
  echo "install.sh: needs root and apt-get to install ${packages[*]}" >&2
  exit 2
fi
dpkg --status "${packages[@]}" >/dev/null 2>&1 && exit
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${packages[@]}"
