"""What of kvrelay runs on this machine's GPUs?

`python -m bench.gpu_check [--json]`

Nothing yet: the engine's kernels are plain PyTorch on CPU memory, and no link uses NCCL. The command exists so that
`make gpu-check` says so, with the cards and versions it found, instead of passing in silence.
"""

from __future__ import annotations

import click
import torch

from bench.report import Report


@click.command(help="Check the GPU path, as far as there is one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(as_json: bool) -> None:
    report = Report("gpu_check")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report.figures = {"cuda_devices": cards, "checks_run": 0}
    report.notes = [f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}" for index in range(cards)]
    report.notes.append("no check was run: there are no CUDA kernels and no NCCL links in this version")
    report.print(as_json)


if __name__ == "__main__":
    main()
