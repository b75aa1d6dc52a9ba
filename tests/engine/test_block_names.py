"""What block events call a request's blocks."""

from __future__ import annotations

from factories import make_request

from engine.block_hash import pack_tokens
from engine.block_names import BlockNames
from engine.routing_key import RoutingKeys


def test_blocks_go_by_the_keys_under_which_a_router_looks_them_up_public_ones_too() -> None:
    names = BlockNames()
    names.use_seed(7)
    request = make_request(list(range(20)), num_public_tokens=10)
    names.of(request, 4)
    request.token_ids += [1, 2, 3, 4]
    keys = RoutingKeys(7, request.scope, pack_tokens(request.token_ids), 4, num_public_tokens=10).all_short()
    assert [int.from_bytes(name, "little") for name in names.of(request, 4)] == keys
