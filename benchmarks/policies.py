"""Compares cache policies on real text, simulated: python benchmarks/policies.py.

Device reads per token, of 16, in the second half of the text: one token at a time, in chunks of
16K tokens, and in first chunks of documents, for which the cache was filled by others alone. And
what a conversation that says its last 2K tokens again has to read, before and after a prompt of
128K tokens of other text.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ngrams import Trace, gather_ends, released_constants
from benchmarks.policy import POLICIES, Policy, Simulator
from benchmarks.text import load_corpus

_RESULTS = Path(__file__).resolve().parent / "results"
_GROUP_BYTES = 1368  # 8 rows of 160 bytes, 8 ids, and what the cache keeps of a group
_GROUP_READS = 8
_CHUNK = 16_384
_PROMPT = 131_072
_SAID = 2048
_CONVERSATIONS = 12


def stream(trace: Trace, policy: Policy, entries: int) -> dict[str, float]:
    """Read the whole text in two ways."""
    tokens = len(trace.keys)
    half = tokens // 2
    cache = Simulator(policy, trace.hashes, entries)
    cache.run(trace.flat(0, half), 2 * np.arange(1, half + 1))
    one = cache.run(trace.flat(half, tokens), 2 * np.arange(1, tokens - half + 1))
    chunks = np.array(trace.chunks(_CHUNK))
    lengths = chunks[:, 1] - chunks[:, 0]
    cache = Simulator(policy, trace.hashes, entries)
    missed = cache.run(trace.flat(0, tokens), 2 * chunks[:, 1]).missed
    later = chunks[:, 1] > half
    first = later & np.isin(chunks[:, 0], trace.corpus.starts) & (lengths == _CHUNK)
    return {
        "one token": one.missed.mean() * _GROUP_READS,
        "chunks": missed[later].sum() / lengths[later].sum() * _GROUP_READS,
        "first chunks": missed[first].mean() / _CHUNK * _GROUP_READS,
    }


def scan(trace: Trace, policy: Policy, entries: int) -> dict[str, float]:
    """Let prompts pass between what a conversation says again."""
    starts = trace.corpus.starts
    fill = len(starts) // 2
    lengths = np.diff(starts)
    talks = [d for d in range(fill, len(lengths)) if lengths[d] >= 2 * _SAID][:_CONVERSATIONS]
    passing = int(starts[fill // 2])
    cache = Simulator(policy, trace.hashes, entries)
    first = int(starts[max(0, fill - 300)])
    cache.run(trace.flat(first, int(starts[fill])), gather_ends([int(starts[fill]) - first]))
    each = 2 * np.arange(1, _SAID + 1)
    reads = np.zeros((len(talks), 2))
    for place, document in enumerate(talks):
        begin = int(starts[document])
        said = trace.flat(begin + _SAID, begin + 2 * _SAID)
        cache.run(trace.flat(begin, begin + _SAID), gather_ends([_SAID]))
        cache.run(said, each)
        reads[place, 0] = cache.run(said, each).missed.mean()
        cache.run(trace.flat(passing, passing + _PROMPT), gather_ends([_PROMPT]))
        reads[place, 1] = cache.run(said, each).missed.mean()
        passing += _PROMPT
    before, after = reads.mean(axis=0) * _GROUP_READS
    return {"said again": before, "after a prompt": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--mib", type=int, nargs="+", default=[16, 64, 256, 1024, 4096], help="budgets")
    add("--policy", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    add("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    trace = Trace.of(load_corpus(), released_constants())
    print(f"text {trace.corpus.digest}: {len(trace.keys)} tokens, {len(trace.hashes)} n-grams")
    lines: list[dict[str, str]] = []
    for mib in arguments.mib:
        for name in arguments.policy:
            entries = (mib << 20) // _GROUP_BYTES
            found = stream(trace, POLICIES[name], entries) | scan(trace, POLICIES[name], entries)
            shown = {key: f"{value:.2f}" for key, value in found.items()}
            lines.append({"mib": str(mib), "policy": name, **shown})
            print(f"{mib:5} MiB  {name:20}", *(f"{k} {v}  " for k, v in shown.items()), flush=True)
    if not arguments.no_results:
        path = _RESULTS / f"policies-text{trace.corpus.digest}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, lines[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
