// Orders what another process sees of our writes, and what we see of its: both ends of a lent block call it.
void kvrelay_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
