"""Prompts, demonstrations and rewards of the two tasks."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforcement import tasks


@pytest.fixture(scope="module")
def paths():
    return tasks.Paths(0, nodes=8, degree=2, longest=5)


@pytest.fixture(scope="module")
def addition():
    return tasks.Addition(0)


def breadth_first(edges, start):
    found, queue = {start: 0}, collections.deque([start])
    while queue:
        node = queue.popleft()
        for successor in np.flatnonzero(edges[node]):
            if successor not in found:
                found[successor] = found[node] + 1
                queue.append(successor)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_distances_are_those_of_a_breadth_first_search(seed):
    edges = tasks.random_graph(9, 2, np.random.default_rng(seed))
    distances = tasks.shortest_distances(edges)
    for start in range(9):
        found = breadth_first(edges, start)
        assert [found[node] for node in range(9)] == distances[start].tolist()


def test_distances_without_a_way():
    edges = np.zeros((3, 3), bool)
    edges[0, 1] = True
    np.testing.assert_array_equal(
        tasks.shortest_distances(edges), [[0, 1, 3], [3, 0, 3], [3, 3, 0]]
    )


def test_graphs_have_the_degree_that_was_asked_for_and_no_loops():
    edges = tasks.random_graph(8, 3, np.random.default_rng(0))
    np.testing.assert_array_equal(edges.sum(axis=1), 3)
    assert not edges.diagonal().any()


def optimality(paths, goal, walk):
    """One walk, scored by a loop: reward and number of actions."""
    for steps, (node, successor) in enumerate(itertools.pairwise(walk), 1):
        if not paths.edges[node, successor]:
            return 0.0, steps
        if successor == goal:
            return paths.distances[walk[0], goal] / steps, steps
    return 0.0, len(walk) - 1


def test_walks_are_scored_as_by_a_loop(paths):
    rng = np.random.default_rng(0)
    pairs = paths.train_prompts[rng.integers(0, len(paths.train_prompts), 400)]
    walks = [pairs[:, 1]]
    for _ in range(5):  # mostly along edges, sometimes anywhere
        edge = [rng.choice(np.flatnonzero(paths.edges[node])) for node in walks[-1]]
        walks.append(np.where(rng.random(400) < 0.1, rng.integers(0, 8, 400), edge))
    walks = np.stack(walks, axis=1)
    tokens = jnp.asarray(np.concatenate([pairs[:, :1], walks], axis=1), jnp.int32)
    rewards, mask = jax.jit(paths.score)(tokens)
    expected = [optimality(paths, g, w) for g, w in zip(pairs[:, 0], walks, strict=True)]
    np.testing.assert_allclose(rewards, [reward for reward, _ in expected], rtol=1e-6)
    np.testing.assert_array_equal(mask.sum(axis=1), [steps for _, steps in expected])
    assert not np.any(~np.asarray(mask)[:, :-1] & np.asarray(mask)[:, 1:])  # a prefix
    assert {0.0, 1.0} < set(np.round(np.asarray(rewards, float), 3))  # and shares between


def test_walks_are_random_and_arrive(paths):
    tokens, mask = jax.jit(paths.demonstrations, static_argnums=1)(jax.random.key(0), 2000)
    rewards, scored = paths.score(tokens)
    kept = np.asarray(mask.any(axis=1))
    np.testing.assert_array_equal(np.asarray(mask)[kept], np.asarray(scored)[kept])
    assert np.all(np.asarray(rewards)[kept] > 0)
    assert np.all(np.asarray(tokens[:, 0] == tokens[:, 1])[~kept])  # back to the start
    assert 0.2 < np.mean(np.asarray(rewards)[kept] < 1) < 0.8  # detours
    # From each node both successors, about as often.
    first = np.asarray(tokens[:, 1:3])
    for node in range(8):
        shares = np.bincount(first[first[:, 0] == node, 1], minlength=8) / np.sum(
            first[:, 0] == node
        )
        np.testing.assert_allclose(shares[paths.edges[node]], 0.5, atol=0.15)
        assert shares[~paths.edges[node]].sum() == 0


@pytest.mark.parametrize("name", tasks.TASKS)
def test_held_out_prompts_are_not_trained_on(name):
    task = tasks.TASKS[name](3)
    train, test = ({tuple(row) for row in p} for p in (task.train_prompts, task.test_prompts))
    assert len(train) == len(task.train_prompts)
    assert len(test) == len(task.test_prompts) > 0
    assert not train & test
    assert np.max(task.train_prompts) < task.vocab_size
    again = tasks.TASKS[name](3)
    np.testing.assert_array_equal(again.train_prompts, task.train_prompts)
    assert not np.array_equal(tasks.TASKS[name](4).train_prompts, task.train_prompts)


def test_paths_can_be_walked(paths):
    prompts = np.concatenate([paths.train_prompts, paths.test_prompts])
    assert len(prompts) == np.sum((paths.distances > 0) & (paths.distances <= 5))
    distances = paths.distances[prompts[:, 1], prompts[:, 0]]
    assert distances.min() == 1
    assert distances.max() <= 5


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("27+45=270", 1.0),
        ("27+45=370", 0.0),
        ("27+45=072", 0.0),
        ("99+99=891", 1.0),
        ("00+00=000", 1.0),
        ("05+06=110", 1.0),
        ("05+06==00", 0.0),  # the digit 11 is not a digit
    ],
)
def test_sums_are_compared_as_numbers(addition, text, reward):
    tokens = jnp.array([["0123456789+=".index(c) for c in text]])
    rewards, mask = addition.score(tokens)
    assert rewards.tolist() == [reward]
    assert mask.tolist() == [[True] * 3]


def test_lessons_are_as_wrong_as_asked_for(addition):
    demonstrate = jax.jit(addition.demonstrations, static_argnums=1)
    tokens, mask = demonstrate(jax.random.key(0), 4000)
    assert mask.all()
    np.testing.assert_allclose(np.mean(addition.score(tokens).rewards), 0.4, atol=0.03)
    a, b = tokens[:, 0] * 10 + tokens[:, 1], tokens[:, 3] * 10 + tokens[:, 4]
    right = np.stack([(a + b) // 10**place % 10 for place in range(3)], axis=1)
    wrong = np.asarray(tokens[:, 6:]) != right
    assert wrong.sum(axis=1).max() == 1
    np.testing.assert_allclose(wrong.mean(axis=0), 0.2, atol=0.03)  # each place, a third of 60 %
    prompts = {tuple(row) for row in tokens[:, :6].tolist()}
    assert not prompts & {tuple(row) for row in addition.test_prompts.tolist()}


def test_lessons_can_be_right():
    task = tasks.Addition(0, corrupted=0.0)
    tokens, _ = task.demonstrations(jax.random.key(0), 100)
    assert np.all(task.score(tokens).rewards == 1)


def test_prompts_are_drawn_from_what_is_given():
    prompts = np.arange(12, dtype=np.int32).reshape(6, 2)
    drawn = tasks.draw_prompts(prompts, jax.random.key(0), 100)
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in prompts.tolist()}
