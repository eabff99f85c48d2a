"""One worker is stopped in the middle of training."""

import os
import signal
import subprocess
import sys

import torch
from helping import begin, falls_ill, training

rank, _ = begin()
step = training()
for number in range(20):
    if rank == 1 and number == 7:
        falls_ill()
        # Somebody continues it, so that the run can end.
        wake = f"import os, time; time.sleep(4); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        subprocess.Popen([sys.executable, "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    step(torch.ones(8, 100))
