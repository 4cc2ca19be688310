"""Memory plans of known shapes: formulas, advice and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llama_dflash import plan
from llama_dflash.cli import cli
from llama_dflash.errors import DFlashError, ModelFileError, UsageError
from llama_dflash.memory import GIB
from llama_dflash.shapes.arena import Graph

MIB = 2**20
BASE = plan.Settings(4096)
# Logged by llama-server (pin, CPU, flash attention, 4096 cells, F16) for shapes of 8 layers: MiB of compute buffers, without
# and with a draft, then of the DFlash and of the DFlash2 draft.
LOGGED = {
    "qwen3.5-0.8b": (46.16, 52.16, 986.96, 488.02),
    "qwen3.5-4b": (73.02, 98.02, 975.09, 517.53),
    "qwen3.5-9b": (100.02, 140.02, None, 536.53),
    "qwen3.5-27b": (136.02, 186.02, 980.09, 538.79),
    "qwen3.5-35b-a3b": (76.02, 92.02, 978.00, None),
}


def shrunk(name: str, draft_format: str) -> tuple[plan.Model, plan.Model]:
    """The pair with a target of 8 layers."""
    out = []
    for shape in (name, f"{name}-{draft_format}"):
        made = plan.layout.of(plan.find_shape(shape).shrunk(8), "q4_k_m")
        out.append(plan.Model(made.facts, {t.name: t.n_bytes for t in made.tensors}))
    return out[0], out[1]


@pytest.mark.parametrize("name", LOGGED)
def test_compute_buffers_of_every_shape(name: str) -> None:
    plain, drafting, dflash, dflash2 = LOGGED[name]
    pair = shrunk(name, "dflash")
    ar = plan.make(pair[0], None, replace(BASE, mode="ar")).device["compute"] / MIB
    tree = plan.make(*pair, BASE).device
    assert ar == pytest.approx(plain, rel=0.005)
    assert tree["compute"] / MIB == pytest.approx(drafting, rel=0.005)
    if dflash:
        assert tree["draft_compute"] / MIB == pytest.approx(dflash, rel=0.03)
    if dflash2:
        made = plan.make(*shrunk(name, "dflash2"), replace(BASE, mode="chain", n_max=3)).device
        assert made["draft_compute"] / MIB == pytest.approx(dflash2, rel=0.03)
        assert made["draft_kv"] == 50 * MIB * 4 // (4 if name != "qwen3.5-35b-a3b" else 5)


def test_states_of_the_27b() -> None:
    """The figures of docs/design.md: 16 more states for 15 drafted tokens, or 54 MiB of stash for 16 nodes."""
    pair = plan.preset("qwen3.5-27b", "q4_k_m", "q8_0", "dflash")
    snapshot = plan.make(*pair, replace(BASE, mode="chain", rollback="snapshot")).device
    replay = plan.make(*pair, replace(BASE, mode="chain")).device
    assert (snapshot["snapshots"] + snapshot["recurrent_state"]) / MIB == pytest.approx(2394, abs=1)
    assert snapshot["stash"] == replay["snapshots"] == 0
    assert replay["stash"] / MIB == pytest.approx(54 * 17 / 16, abs=1)


def test_kv_grows_with_context_and_type() -> None:
    pair = plan.preset("qwen3.5-27b", "q4_k_m", "q8_0", "dflash")
    assert plan.make(*pair, plan.Settings(131072, kv="q4_0")).device["kv"] == 131072 * 18432
    assert plan.make(*pair, plan.Settings(131072)).device["kv"] == 131072 * 65536
    windowed = plan.preset("qwen3.5-27b", "q4_k_m", "q8_0", "dflash2")
    assert plan.make(*windowed, plan.Settings(131072)).device["draft_kv"] == 50 * MIB


def test_an_untied_embedding_stays_on_the_host() -> None:
    model = plan.from_shape("qwen3.5-27b", "q4_k_m")
    assert model.weight_bytes - model.device_weight_bytes == model.embedding_bytes
    # sokann's model card: 14.735 GiB on the GPU for mradermacher's Q4_K_M of the 27B.
    assert model.device_weight_bytes / GIB == pytest.approx(14.735, abs=0.002)
    tied = plan.from_shape("qwen3.5-4b", "q4_k_m")
    assert tied.device_weight_bytes == tied.weight_bytes


def test_settings_that_do_not_go_together(pair: tuple[Path, Path]) -> None:
    target, draft = (plan.from_file(path) for path in pair)
    with pytest.raises(UsageError, match="needs a draft"):
        plan.make(target, None, BASE)
    with pytest.raises(UsageError, match="expected replay"):
        plan.make(target, draft, replace(BASE, rollback="snapshot"))
    with pytest.raises(UsageError, match=r"n_max is 16, expected 1\.\.15"):
        plan.make(target, draft, replace(BASE, n_max=16))
    with pytest.raises(UsageError, match="KV type 'q3' is unknown"):
        plan.make(target, draft, replace(BASE, kv="q3"))
    with pytest.raises(ModelFileError, match="is a draft"):
        plan.make(draft, None, replace(BASE, mode="ar"))


def invoke(*args: str) -> tuple[dict[str, Any], BaseException | None]:
    result = CliRunner().invoke(cli, ["plan", "--json", *args])
    return (json.loads(result.stdout) if result.stdout.startswith("{") else {}), result.exception


def test_what_fits() -> None:
    out, error = invoke("--gpu", "24", "--ctx", "131072", "--kv", "q4_0", "--preset", "qwen3.5-27b")
    assert error is None
    assert out["schema"] == 1
    assert out["fits"] is True
    assert out["total_bytes"] == sum(out["device_bytes"].values())
    assert out["free_bytes"] == out["gpu_bytes"] - out["total_bytes"] - out["reserve_bytes"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpu", "24", "--ctx", "65536", "--mode", "chain", "--rollback", "snapshot"), "--rollback replay"),
        (("--gpu", "24", "--ctx", "98304"), "--kv q"),
        (("--gpu", "20", "--ctx", "262144", "--kv", "q4_0", "--draft-kv", "q4_0"), "--ctx "),
        (("--gpu", "16"), "--mode ar"),
        (("--gpu", "8"), "smaller mix or model"),
    ],
)
def test_advice(args: tuple[str, ...], words: str) -> None:
    out, error = invoke("--preset", "qwen3.5-27b", *args)
    assert isinstance(error, DFlashError)
    assert error.exit_code == 1
    assert out["fits"] is False
    assert words in out["advice"]
    assert "\n" not in str(error)


def test_without_a_gpu_the_family_is_listed() -> None:
    out, error = invoke("--ctx", "32768")
    assert error is None
    sizes = {line["gpu_bytes"] // GIB: line for line in out["sizes"]}
    assert list(sizes) == [8, 12, 16, 24, 32]
    assert sizes[8]["quant"] is None
    assert sizes[16]["mode"] == "ar"
    assert sizes[24]["mode"] == sizes[32]["mode"] == "tree"
    assert sizes[24]["n_ctx_max"] >= 32768


def test_files_and_a_preset_exclude_each_other(pair: tuple[Path, Path]) -> None:
    assert isinstance(invoke("-m", str(pair[0]), "--preset", "qwen3.5-4b")[1], UsageError)
    assert isinstance(invoke("-md", str(pair[1]))[1], UsageError)
    out, error = invoke("-m", str(pair[0]), "-md", str(pair[1]), "--gpu", "1")
    assert error is None
    assert out["draft"] == "tiny-py-dflash"
    assert invoke("-m", str(pair[0]))[0]["mode"] == "ar"


def test_the_replayed_allocator() -> None:
    """Room is used again, in place where an operation may, and the best-fitting gap is taken."""
    g = Graph()
    x = g.leaf(1024)
    y = g.op((2048,), x)
    z = g.op((2048,), y, in_place=True)
    g.output(g.op((512,), z))
    assert g.peak_bytes() == 4 * (1024 + 2048)  # the last result takes the room of x
