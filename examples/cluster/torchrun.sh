#!/bin/sh
# Train on two machines with torchrun. Run this script on both, with the number of the machine:
#
#     ./torchrun.sh 0 digits.py        # on the machine whose address is MASTER
#     ./torchrun.sh 1 digits.py        # on the other machine
#
# Copy the file with the secret to both machines first: (umask 077; openssl rand -hex 32 > paceline-secret)

MASTER=${MASTER:-10.0.0.1}
number=$1
shift

exec torchrun --nnodes 2 --nproc-per-node 2 --node-rank "$number" --master-addr "$MASTER" --master-port 29500 \
    -m paceline.join ${PACELINE_OPTIONS:---sync elastic-bsp} --port 29600 --secret-file paceline-secret "$@"
