"""`python -m prefill_worker`: one prefill worker without Ray."""

from __future__ import annotations

from prefill_worker.worker import PrefillWorker
from worker.flags import worker_command

main = worker_command("prefill", PrefillWorker.build)

if __name__ == "__main__":
    main()
