"""`python -m decode_worker`: one decode worker without Ray."""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from worker.flags import worker_command

main = worker_command("decode", DecodeWorker.build)

if __name__ == "__main__":
    main()
