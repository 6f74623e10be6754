"""The documentation: its code runs, its reference is whole, its links lead somewhere."""

import functools
import importlib.util
import inspect
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import lowrank_optax as lro
from tests.markdown import python_blocks, run

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
# Pages whose code other tests run, where what it needs is installed.
RUN_ELSEWHERE = {"tunix.md": "tests/examples/test_tunix.py"}
RUN_HERE = [n for n, page in PAGES.items() if "```python" in page and n not in RUN_ELSEWHERE]
# What needs files or a network that the tests have not: at most so many blocks.
MOST_NOT_RUN = 1


def scale_names(tmp_path):
    """What the reader of scale.md has at hand."""
    import orbax.checkpoint as ocp

    params = {"kernel": jnp.ones((64, 256))}
    tx = lro.galore_adamw(1e-2, rank=8)

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(batch @ params["kernel"]))

    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", tx.init(params))
    checkpointer.wait_until_finished()
    return {
        "partial": functools.partial,
        "params": params,
        "param_shardings": {"kernel": NamedSharding(mesh, PartitionSpec("fsdp", "tp"))},
        "tx": tx,
        "grad_fn": lro.compact_value_and_grad(loss_fn),
        "checkpointer": checkpointer,
        "path": tmp_path / "saved",
    }


def finetune_names(tmp_path):
    pytest.importorskip("flax")
    spec = importlib.util.spec_from_file_location("lora", ROOT / "examples" / "model" / "lora.py")
    assert spec is not None
    assert spec.loader is not None
    lora = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lora)
    adapted = {"kernel": jnp.ones((256, 256)), "lora_a": jnp.ones((256, 8))}
    adapted["lora_b"] = jnp.zeros((8, 256))
    return {"lora": lora, "params": {"q_proj": adapted, "up": {"kernel": jnp.ones((256, 512))}}}


# Pages that show the lines that matter of a longer program. All others run as they are.
NAMES = {"scale.md": scale_names, "finetune_llm.md": finetune_names, "rl.md": lambda tmp_path: {}}


def test_few_blocks_are_not_run():
    skipped = [b for page in PAGES.values() for b in python_blocks(page) if not b.is_run]
    assert len(skipped) <= MOST_NOT_RUN
    for page in PAGES.values():  # a fence that the tests do not see is a block that rots
        assert page.count("```python") == len(python_blocks(page))


def test_what_is_not_run_here_is_run_elsewhere():
    for page, module in RUN_ELSEWHERE.items():
        assert f"docs/{page}" in (ROOT / module).read_text()


@pytest.mark.parametrize("name", RUN_HERE)
def test_code_runs_and_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    if name in NAMES:
        names = {"jax": jax, "jnp": jnp, "optax": optax, "lro": lro} | NAMES[name](tmp_path)
    # Dataclasses and pickles look for the module that they were made in.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    module.__dict__.update(names)
    for block in python_blocks(PAGES[name]):
        if not block.is_run:
            continue
        printed = run(block, module.__dict__, name)
        if block.output is not None:
            assert printed.strip() == block.output.strip(), f"{name}, line {block.line}"


def public_names():
    """What ``import lowrank_optax`` promises."""
    return {
        name
        for name, value in vars(lro).items()
        if not name.startswith("_")
        and (not inspect.ismodule(value) or value.__name__ == f"lowrank_optax.{name}")
        and not getattr(value, "__name__", "").startswith("lowrank_optax._")
    }


def test_reference_has_every_public_name_once():
    pages = "".join(page for name, page in PAGES.items() if name.startswith("api/"))
    found = re.findall(r"^\.\. auto\w+:: lowrank_optax\.(\w+)$", pages, re.MULTILINE)
    assert sorted(found) == sorted(public_names())
    assert len(found) > 50


def test_reference_names_every_argument_of_public_functions():
    """An argument that a docstring does not explain would show in a signature alone."""
    for name in public_names():
        value = inspect.unwrap(getattr(lro, name))
        if not inspect.isfunction(value):
            continue
        described = re.findall(r"^ +\*{0,2}(\w+): ", value.__doc__ or "", re.MULTILINE)
        missing = set(inspect.signature(value).parameters) - set(described)
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name):
    here = (DOCS / name).parent
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", PAGES[name]):
        if not target.startswith(("http:", "https:")):
            assert (here / target).exists(), target


def test_every_page_is_in_a_table_of_contents():
    listed = {"index.md"}
    for name, page in PAGES.items():
        for entries in re.findall(r"```{toctree}\n(.*?)```", page, re.DOTALL):
            for entry in re.findall(r"^(\w[\w/]*)$", entries, re.MULTILINE):
                path = (DOCS / name).parent / f"{entry}.md"
                assert path.exists(), f"{name}: {entry}"
                listed.add(str(path.relative_to(DOCS)))
    assert listed == set(PAGES)


def test_links_of_the_reference_lead_to_names():
    for name, page in PAGES.items():
        for target in re.findall(r"{py:\w+}`~?lowrank_optax\.([\w.]+)`", page):
            value = functools.reduce(getattr, target.split("."), lro)
            assert value is not None, f"{name}: {target}"
