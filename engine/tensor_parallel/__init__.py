"""One model on several processes of a worker, each with an equal share of the heads and of the inner sizes.

    rank 0    `model.py`   schedules and samples as ever; its model tells the others each batch, and computes a share
              `ranks.py`   owns their processes: starts them, watches them, ends with them
    others    `rank.py`    compute their shares of the batches that they are told, and nothing else
    all       `shards.py`  which part of each weight is whose; `group.py` the sums of what the ranks compute
              `messages.py` what rank 0 and a rank say to each other

On CPUs all ranks keep their KV in the pool of rank 0, each its own heads of every block. So a block is what it is
without ranks: whole, at one place, and everything else (links, prefix cache, swapping, copies) knows nothing of ranks.
Each byte has one writer: during a step the rank whose head it is, between steps whoever owned it before.
"""
