# Sourced by the batch scripts: find the environment, then start one rank a task with the launcher of your choice.
#
#   sbatch examples/slurm/cpu.sbatch train.py                                   mpirun
#   sbatch --export=ALL,LAUNCHER=horovodrun examples/slurm/cpu.sbatch train.py
#   sbatch --export=ALL,LAUNCHER=srun examples/slurm/cpu.sbatch train.py        srun --mpi=pmix
#   sbatch --export=ALL,LAUNCHER=torchrun examples/slurm/cpu.sbatch train.py    PyTorch alone: no MPI, no Horovod

# On a cluster with modules, load your compiler and Python here, e.g.:
# module load gcc python

venv=${VENV:-$SLURM_SUBMIT_DIR/.venv}
[[ -r $venv/bin/activate ]] || {
    echo "No environment in $venv: make install there, or name another with VENV" >&2
    exit 2
}
source "$venv/bin/activate"

# One rank has the cores of one task.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} TF_NUM_INTRAOP_THREADS=${SLURM_CPUS_PER_TASK:-1}
# Rank 0 writes what was measured and decided; read it with `hvdplus report`. A requeued job has the same number, and
# would overwrite what it wrote before.
log=$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}.jsonl
export HVDPLUS_RUN_LOG=${HVDPLUS_RUN_LOG:-$log}

launch() {
    local ranks=${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))} # of a node
    case ${LAUNCHER:-mpirun} in
        # Open MPI finds hosts and numbers of ranks in Slurm's environment.
        mpirun) mpirun -np "$SLURM_NTASKS" --bind-to none "$@" ;;
        # Since 22.05 srun does not take the batch script's --cpus-per-task by itself: each rank would be held to one core.
        # A rank that fails ends the others, and so does one that has ended for a minute. For a log of each rank's own:
        # srun --output=%x-%j-%t.out ...
        srun)
            # By default Slurm's barrier between nodes is a tree, which can let ranks go before all have come (22.05): Open
            # MPI then gets a message while it still starts, and ends with a segmentation fault. The ring waits for all.
            export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}
            srun --mpi=pmix --kill-on-bad-exit=1 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$@"
            ;;
        torchrun) # one on every node, which meet on the first; a port of the job's own
            local meet
            meet=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1):$((10000 + SLURM_JOB_ID % 20000))
            srun --mpi=none --kill-on-bad-exit=1 --wait=60 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
                --cpus-per-task=$((ranks * ${SLURM_CPUS_PER_TASK:-1})) torchrun --nnodes="$SLURM_JOB_NUM_NODES" \
                --nproc-per-node="$ranks" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$meet" \
                --no-python "$@"
            ;;
        horovodrun)
            if [[ $SLURM_JOB_NUM_NODES == 1 ]]; then
                horovodrun -np "$SLURM_NTASKS" "$@"
            else # between hosts horovodrun needs ssh without a password
                local hosts
                hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$ranks/" | paste -sd,)
                horovodrun -np "$SLURM_NTASKS" -H "$hosts" "$@"
            fi
            ;;
        *)
            echo "LAUNCHER must be mpirun, horovodrun, srun or torchrun. Received: $LAUNCHER" >&2
            return 2
            ;;
    esac
}
