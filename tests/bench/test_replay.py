from __future__ import annotations

from pathlib import Path

import pytest

from bench.replay import ideal_hit_rate
from bench.replay_rules import RULES, Ours
from bench.replay_workers import PREFILL_MS_PER_TOKEN, PREFILL_OVERHEAD_MS, Simulation
from bench.traces import MOONCAKE_BLOCK, NAMED, Recorded, read_trace

TWICE = [Recorded(float(n), 4 * MOONCAKE_BLOCK + 1, 10, (1, 2, 3, 4)) for n in (0, 100)]


def test_the_recorded_half_of_the_conversations_is_there_with_the_hits_that_it_allows() -> None:
    recorded = read_trace("mooncake_conversation")
    assert len(recorded) == 5606
    assert ideal_hit_rate(recorded) == pytest.approx(34.0, abs=0.1)


def test_named_traces_are_in_the_repository() -> None:
    assert all(path.exists() for path in NAMED.values())
    assert len(read_trace("azure_conversation")) == 19_366


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", (374, 44)),
        ("0,143400,0.0,1.1,Gamma,0.7,0.04\n0,600,5.0,1.1,Gamma,0.7,0.04\n", (2000, 300)),
    ],
    ids=["azure", "servegen"],
)
def test_other_formats_are_told_by_their_first_line(tmp_path: Path, text: str, expected: tuple[int, int]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text.replace("0,143400,0.0,1.1,Gamma,0.7,0.04\n", ""))
    recorded = read_trace(str(path))
    assert (recorded[0].num_prompt, recorded[0].num_output) == expected


def test_a_file_in_no_known_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="no trace"):
        read_trace(str(path))


@pytest.mark.parametrize("rule", [Ours, *RULES.values()])
def test_a_prompt_that_comes_again_is_computed_where_it_was(rule: type[Ours]) -> None:
    outcome = Simulation(1, 100).run(TWICE, rule())
    assert outcome.hit_rate == pytest.approx(100 * 4 / 10)
    assert outcome.ttfts_ms[1] == pytest.approx(PREFILL_OVERHEAD_MS + PREFILL_MS_PER_TOKEN)
    assert outcome.balance == 1.0


def test_ours_finds_the_holder_among_many() -> None:
    assert Simulation(8, 100).run(TWICE, Ours()).hit_rate == pytest.approx(40.0)


def test_a_full_cache_gives_up_what_was_used_longest_ago_last_block_first() -> None:
    other = Recorded(50.0, 2 * MOONCAKE_BLOCK + 1, 10, (8, 9))
    outcome = Simulation(1, 4).run([TWICE[0], other, TWICE[1]], Ours())
    assert outcome.hit_rate == pytest.approx(100 * 2 / 13)
