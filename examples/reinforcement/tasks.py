"""Two tasks whose answers a program can check: short walks on a graph, and two-digit addition.

A task knows its prompts, its flawed demonstrations for supervised training, and the rewards of
completions. Everything that runs while training is a pure function of arrays and may be jitted.
Prompts and completions have fixed lengths, ``prompt_length`` and ``completion_length``.
"""

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Scores(NamedTuple):
    """What a task says of completed prompts.

    Attributes:
        rewards: float32 in [0, 1], one a sequence.
        mask: which tokens of a completion are actions, ``(batch, completion_length)``, true up to
            the one that ends it; what was sampled after that counts for nothing.
    """

    rewards: jax.Array
    mask: jax.Array


class Task(Protocol):
    """What the training loop needs.

    Attributes:
        vocab_size: number of tokens.
        prompt_length: tokens of a prompt.
        completion_length: tokens that are sampled.
        train_prompts: all prompts to learn from, ``(count, prompt_length)``.
        test_prompts: those that are held out.
    """

    vocab_size: int
    prompt_length: int
    completion_length: int
    train_prompts: np.ndarray
    test_prompts: np.ndarray

    def score(self, tokens: jax.Array) -> Scores:
        """Rewards of prompts with completions, ``(batch, prompt_length + completion_length)``."""
        ...

    def demonstrations(self, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Completed prompts for supervised training, and which completion tokens to learn."""
        ...


def draw_prompts(prompts: np.ndarray, key: jax.Array, count: int) -> jax.Array:
    """``count`` of the prompts, with replacement."""
    return jnp.asarray(prompts)[jax.random.randint(key, (count,), 0, len(prompts))]


def _split(prompts: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Nine tenths to train on, the rest to test."""
    shuffled = rng.permutation(prompts.astype(np.int32))
    held_out = max(1, len(shuffled) // 10)
    return shuffled[held_out:], shuffled[:held_out]


def random_graph(nodes: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """A directed graph as a boolean matrix: a random cycle through all nodes, and more edges.

    The cycle makes every node reachable from every other; each node has ``degree`` successors.
    """
    edges = np.zeros((nodes, nodes), bool)
    order = rng.permutation(nodes)
    edges[order, np.roll(order, -1)] = True
    for node in range(nodes):
        others = np.flatnonzero(~edges[node] & (np.arange(nodes) != node))
        edges[node, rng.choice(others, degree - 1, replace=False)] = True
    return edges


def shortest_distances(edges: np.ndarray) -> np.ndarray:
    """Fewest edges from each node (row) to each (column); the number of nodes if there is no way.

    Args:
        edges: a boolean matrix, true from row to column.

    Returns:
        int32, with zeros on the diagonal.
    """
    nodes = len(edges)
    distances = np.where(np.eye(nodes, dtype=bool), 0, nodes).astype(np.int32)
    reached = np.eye(nodes, dtype=bool)
    for steps in range(1, nodes):
        reached = reached | (reached @ edges)
        distances = np.where(reached & (distances == nodes), steps, distances)
    return distances


class Paths:
    """Find a short walk from a start to a goal on a graph that is known only from random walks.

    A prompt is ``goal, start``, a completion the nodes that follow, one token a node. It ends at
    the goal, or with a step along which there is no edge. The reward is its optimality: the
    length of a shortest walk over that of this one, or 0 if it does not arrive.

    Demonstrations are random walks, each labelled with a node that it came through, as for a
    decision transformer: most of them arrive by detours.

    Args:
        seed: of the graph and of the split.
        nodes: of the graph.
        degree: successors of each node.
        longest: steps of a walk before it is given up.
    """

    def __init__(self, seed: int, nodes: int = 20, degree: int = 3, longest: int = 8):
        rng = np.random.default_rng(seed)
        self.edges = random_graph(nodes, degree, rng)
        self.distances = shortest_distances(self.edges)
        self.vocab_size = nodes
        self.prompt_length, self.completion_length = 2, longest
        distances = self.distances.T  # goal, start, as in a prompt
        pairs = np.argwhere((distances > 0) & (distances <= longest))
        self.train_prompts, self.test_prompts = _split(pairs, rng)

    def score(self, tokens: jax.Array) -> Scores:
        """Path optimality, see the class."""
        goal, start, walk = tokens[:, :1], tokens[:, 1], tokens[:, 2:]
        valid = jnp.asarray(self.edges)[tokens[:, 1:-1], walk]
        arrived, failed = walk == goal, ~valid
        over = jnp.cumsum(arrived | failed, axis=1)
        mask = jnp.concatenate([jnp.zeros_like(over[:, :1]), over[:, :-1]], axis=1) == 0
        success = jnp.any(mask & arrived & valid, axis=1)
        steps = jnp.sum(mask, axis=1).astype(jnp.float32)
        shortest = jnp.asarray(self.distances)[start, goal[:, 0]].astype(jnp.float32)
        return Scores(jnp.where(success, shortest / steps, 0.0), mask)

    def demonstrations(self, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Random walks up to a node that they reach. Those back to their start teach nothing."""
        keys = jax.random.split(key, 3)
        start = jax.random.randint(keys[0], (count,), 0, self.vocab_size)
        odds = jnp.where(jnp.asarray(self.edges), 0.0, -jnp.inf)

        def step(node: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            node = jax.random.categorical(key, odds[node]).astype(jnp.int32)
            return node, node

        _, walk = jax.lax.scan(step, start, jax.random.split(keys[1], self.completion_length))
        walk = walk.T
        chosen = jax.random.randint(keys[2], (count, 1), 0, self.completion_length)
        goal = jnp.take_along_axis(walk, chosen, axis=1)
        tokens = jnp.concatenate([goal, start[:, None], walk], axis=1)
        return tokens, self.score(tokens).mask & (goal != start[:, None])


PLUS, EQUALS = 10, 11


class Addition:
    """Add two numbers of two digits, after lessons in which most answers were wrong.

    A prompt is ``2 7 + 4 5 =``, a completion ``2 7 0``, one token a digit, the lowest first, so
    that carries go the way that the answer is written. The reward is 1 for the right number and 0
    for any other.

    Args:
        seed: of the split.
        corrupted: share of demonstrations in which one of the digits, any, is another one. They
            are spoilt anew each time, so there is nothing to learn by heart.
    """

    def __init__(self, seed: int, corrupted: float = 0.6):
        self.corrupted = corrupted
        a, b = np.divmod(np.arange(10_000), 100)
        plus, equals = np.full_like(a, PLUS), np.full_like(a, EQUALS)
        prompts = np.stack([a // 10, a % 10, plus, b // 10, b % 10, equals], axis=1)
        self.vocab_size = 12
        self.prompt_length, self.completion_length = 6, 3
        self.train_prompts, self.test_prompts = _split(prompts, np.random.default_rng(seed))

    def score(self, tokens: jax.Array) -> Scores:
        """Exact match, see the class."""
        a, b = _number(tokens[:, 0:2]), _number(tokens[:, 3:5])
        answer = tokens[:, 6:9]
        right = (_number(answer[:, ::-1]) == a + b) & jnp.all(answer < PLUS, axis=1)
        return Scores(right.astype(jnp.float32), jnp.ones(answer.shape, bool))

    def demonstrations(self, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Prompts of the training split, with right and random answers."""
        asked, spoilt, where, added = jax.random.split(key, 4)
        prompts = draw_prompts(self.train_prompts, asked, count)
        answer = _number(prompts[:, 0:2]) + _number(prompts[:, 3:5])
        digits = jnp.stack([answer % 10, answer // 10 % 10, answer // 100], axis=1)
        wrong = jax.random.bernoulli(spoilt, self.corrupted, (count, 1))
        place = jax.random.randint(where, (count, 1), 0, 3) == jnp.arange(3)[None]
        others = (digits + jax.random.randint(added, (count, 1), 1, 10)) % 10
        digits = jnp.where(wrong & place, others, digits)
        return jnp.concatenate([prompts, digits], axis=1), jnp.ones(digits.shape, bool)


def _number(digits: jax.Array) -> jax.Array:
    """Reads digits along the last axis, the highest first."""
    return functools.reduce(lambda high, low: 10 * high + low, jnp.moveaxis(digits, -1, 0))


TASKS = {"paths": Paths, "addition": Addition}
"""What ``--task`` offers."""
