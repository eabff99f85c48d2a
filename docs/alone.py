"""One worker is the plain loop: compare the parameters of examples/plain.py and examples/loop.py after every step."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def trained(name: str) -> list[torch.Tensor]:
    """All parameters after every step of a script, as `python NAME` runs it."""
    steps: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        steps.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))

    hook = register_optimizer_step_post_hook(keep)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        hook.remove()
    return steps


def main() -> None:
    """Print how many steps agree to the bit, and exit with 1 unless all do."""
    torch.set_num_threads(1)
    plain, alone = trained("plain.py"), trained("loop.py")
    pairs = list(zip(plain, alone, strict=False))
    identical = sum(torch.equal(one, other) for one, other in pairs)
    largest = max(float((one - other).abs().max()) for one, other in pairs)
    print(f"plain.py ends after {len(plain)} steps; loop.py has no target here and takes {len(alone)}.")
    print(f"After {identical} of the first {len(pairs)} steps all {plain[0].numel():,} parameters are identical.")
    print(f"Largest difference: {largest}")
    sys.exit(identical != len(plain))


if __name__ == "__main__":
    main()
