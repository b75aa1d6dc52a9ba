"""How the KV blocks of a prompt get from the prefill worker (P) that computed them into a decode worker's pool (D).

The hand-over of one request, in order:

    D  table.open(ticket)             reserves a slot for each missing block: ordinal, slot, generation, expected hash;
                                      a lease of at most 5 s runs from here on           reservation.py
    P  sender.open(request, ticket)   finds the link to D or opens it in the background  sender.py, link.py
    P  sender.send(blocks)            as prefill completes them; ordinals that the ticket does not ask for are skipped
       BLOCKS or COPIES ->            ticket, incarnation; of each block of the group ordinal, slot, generation, hash,
                                      digest
    D  table.begin_write              each must be what the ticket says, else NACK for it; grants the slot
    D  copy, digest                   all bytes come into their slots; their digests are compared with the sender's
    D  table.end_write                the block is adopted, unless the ticket ended meanwhile: then the slot is quiet
       <- ACK                         P may reuse the source blocks
    P  sender.finish(request)         FINISH -> ; once every block is acknowledged: transfer_done
    D  table.close(ticket)            says which slots are still being written: quarantined until they are quiet

What can go wrong, and who notices:

    a block is not what was agreed    NACK; transfer_failed at P, block_refused at D; the link lives on
    ... as P's own memory changed     block_doubted at P, which reads it again: it is sent no more
    P dies, or its link breaks        D's link thread sees the end of the stream: link_lost for its open tickets
    P freezes                         nothing renews the lease: table.expire. Frames it sends after it wakes up name
                                      a ticket that is over, and are refused
    D dies                            P's link sees the end of the stream: transfer_failed(LinkClosed)
    D freezes                         nothing is acknowledged for `progress_timeout_s`: the link is torn down, the same
    the request is cancelled          at P: sender.abort, ABORT -> , link_lost at D. At D: table.close; P learns it
                                      from the refusal of its next block or renewal

A link is one connected socket for one (P, D incarnation) pair and carries all their requests, group by group in turn.
Its control frames are length-prefixed msgpack with a closed schema (frames.py). The transports differ only in where
the payload of a block comes from:

    adopt   nowhere: D reads it in P's pool, which it has mapped, for as long as it needs it;
            only where it is named                                                             transport_adopt.py
    shm     D copies it out of P's pool, which it has mapped; on one host                      transport_shm.py
    nccl    through a NCCL communicator of the pair, between GPUs                              transport_nccl.py
    tcp     it follows its frame on the control connection                                     transport_tcp.py
    gloo    through a Gloo group of the pair; only where it is named                           transport_gloo.py

The first of them that both ends offer is tried first; if it does not work between them, the next; if none does, the
transfer fails and D computes the prompt. With a cluster key (authentication.py) both ends prove who they are before
anything is mapped, allocated or told.

The two may lay their blocks out otherwise: D may hold fewer heads, or another number of tokens in a block. The ticket
says how D's are; P makes blocks of that layout before it takes their digest, and everything above stays as it is, for
tickets, hashes and slots are D's anyway (conversion.py). `shm` and `adopt` take blocks as they are, so such links are
`tcp`.

Without a copy (`adopt`), a LEND frame says where each block is, and in which generation of its slot. D adopts them as
it adopts what was copied, but for the digest: it is P's memory itself that it reads. The last block of a prompt, into
which D goes on writing, and what P may not lend, is copied over the same link. While anything is lent, P asks now and
then (ASK_LOANS), and D answers with what it needs no more (RELEASE); an answer that does not come within the lease ends
the link, and with it all that was lent over it (loans.py). What P then does with the memory, D sees by the generations
(engine/lending.py, engine/borrowing.py).

What can go wrong can be made to: faults.py injects faults into the frames of either direction.

**Why the receiver copies.** On one host P could write into D's pool directly, which is as fast. But a one-sided writer
that stops in the middle (a scheduler pause, SIGSTOP, a debugger) and comes back later writes into whatever the slot
holds by then, and nobody can take that write back. So P's pool is mapped *read-only* into D, and D makes the copy: no
process can ever write into another's memory, D knows at every moment which of its slots are being written, and a
frozen P is harmless. What is left is the mirror image: P may reuse a source block while D still reads it, because P's
transfer was aborted. Then D has copied bytes that are not what P announced, and the digest, taken by P before it sent
the frame and compared by D after the copy, says so.

A ticket id is the permission to write. Whoever makes one must make it unguessable.
"""
