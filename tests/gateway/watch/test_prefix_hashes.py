"""The hashes by which a router finds a prompt's prefix in a replica's tree."""

from __future__ import annotations

import numpy as np

from minisgl.core.req import IdArray
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache
from minisgl_gateway.router.prefix_hashes import TreeHashes, prompt_hashes, reported_lengths

PAGE = 4


def _ids(*values: int) -> IdArray:
    return np.array(values, np.int32)


def _tree(*prompts: IdArray, namespace: str = "") -> RadixPrefixCache:
    cache = RadixPrefixCache(PAGE, load_common_prefix())
    page = 0
    for ids in prompts:
        count = len(ids) // PAGE
        root = cache.match(ids[:0], namespace)
        cache.insert(root, ids[: count * PAGE], list(range(page, page + count)), 0)
        page += count
    return cache


def _pages_found(cache: RadixPrefixCache, ids: IdArray, namespace: str = "") -> int:
    told = set(TreeHashes(cache)().tolist())
    found = [hash_ in told for hash_ in prompt_hashes(ids, PAGE, namespace).tolist()]
    return max((index + 1 for index, is_told in enumerate(found) if is_told), default=0)


def test_hashes_are_of_whole_pages_and_of_all_before() -> None:
    ids = np.arange(11, dtype=np.int32)
    hashes = prompt_hashes(ids, PAGE).tolist()
    assert len(hashes) == 2
    assert hashes == prompt_hashes(ids[:8], PAGE).tolist()
    other = ids.copy()
    other[0] = 99
    assert not set(hashes) & set(prompt_hashes(other, PAGE).tolist())
    swapped = ids[[1, 0, *range(2, 11)]]
    assert not set(hashes) & set(prompt_hashes(swapped, PAGE).tolist()), "positions count"
    assert prompt_hashes(ids, 2 * PAGE).tolist() == hashes[1:], "the page size does not"
    assert prompt_hashes(ids[:3], PAGE).tolist() == []


def test_a_prompt_finds_the_end_of_an_edge_and_most_of_what_it_shares() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1000, 13 * PAGE, dtype=np.int32)
    assert reported_lengths(13) == [13, 12, 9]
    cache = _tree(base)
    assert _pages_found(cache, np.append(base, _ids(1, 2, 3, 4))) == 13
    for shared in range(1, 13):
        prompt = np.append(base[: shared * PAGE], _ids(*[5] * 40))
        found = _pages_found(cache, prompt)
        assert found == max((each for each in (0, 9, 12) if each <= shared), default=0)
    # A branch splits the edge: its upper end is then reported.
    cache.insert(
        cache.match(base[:0]), np.append(base[: 7 * PAGE], _ids(5, 5, 5, 5)), [*range(20, 28)], 0
    )
    assert _pages_found(cache, np.append(base[: 7 * PAGE], _ids(6, 6, 6, 6))) == 7


def test_where_a_fork_has_gone_the_branch_is_longer() -> None:
    base = np.arange(6 * PAGE, dtype=np.int32)
    cache = _tree(base, np.append(base[: 3 * PAGE], _ids(99, 98, 97, 96)))
    told = TreeHashes(cache)
    told()
    cache.match(base)  # used last
    assert len(cache.evict(1)) == 1
    assert told().tolist() == TreeHashes(cache)().tolist()


def test_namespaces_share_nothing() -> None:
    ids = np.arange(8, dtype=np.int32)
    cache = _tree(ids, namespace="tenant")
    assert _pages_found(cache, ids, "tenant") == 2
    assert _pages_found(cache, ids) == 0


def test_a_large_tree_reports_the_prefixes_used_last() -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 1000, 3 * PAGE, dtype=np.int32) for _ in range(50)]
    cache = _tree(*prompts)
    told = TreeHashes(cache, limit=20)()  # an edge of 3 pages has hashes of 3 and 2
    assert len(told) == 20
    held = [bool(np.isin(prompt_hashes(ids, PAGE)[1:], told).all()) for ids in prompts]
    assert held == [False] * 40 + [True] * 10
    assert TreeHashes(NaivePrefixCache(PAGE))().tolist() == []


def test_what_is_remembered_of_edges_follows_the_tree() -> None:
    rng = np.random.default_rng(2)
    cache = RadixPrefixCache(PAGE, load_common_prefix())
    again, page = TreeHashes(cache), 0
    prompts = [rng.integers(0, 3, 6 * PAGE, dtype=np.int32) for _ in range(30)]
    for index, ids in enumerate(prompts):
        ids[: 4 * PAGE] = prompts[index // 3][: 4 * PAGE]  # splits edges
        cache.insert(cache.match(ids[:0]), ids, list(range(page, page + 6)), 0)
        page += 6
        if index % 4 == 3:
            cache.evict(5)
        assert again().tolist() == TreeHashes(cache)().tolist()
