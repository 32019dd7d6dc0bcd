"""The SLURM job that a process belongs to, as Lightning finds it: of whoever was started by `srun` or `sbatch`."""

from __future__ import annotations

import os
import subprocess

from lightning.pytorch.plugins.environments import SLURMEnvironment


def job() -> str | None:
    """The job's number, with that of the task where it is one of an array: `1234` or `1234_5`; none outside of one.

    It stays the same when SLURM starts the job again.
    """
    if not SLURMEnvironment.detect():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def is_started_again() -> bool:
    """Whether SLURM has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def requeue() -> str:
    """Ask SLURM to start this job again; what came of it, in words."""
    command = ["scontrol", "requeue", str(job())]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        return f"{' '.join(command)} failed ({error.strerror}): submit the job again"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(command)} failed ({error.stderr.strip()}): submit the job again"
    return f"job {command[-1]} is queued again"
