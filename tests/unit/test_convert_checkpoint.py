"""Converting Hugging Face folders: reading them, what is refused before anything is written, and running the converter."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import gguf as library
import numpy as np
import pytest
from checkpoints import FACTS, FACTS2

from llama_dflash.convert import checkpoint, convert, layout, pinned, rewrite
from llama_dflash.errors import DFlashError, ModelFileError, PairingError, UsageError

Make = Callable[..., Path]
KINDS = library.GGUFValueType
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Make:
    """A random checkpoint; `config` changes config.json (None leaves a key out), `tensors` the tensors (None leaves one out)."""

    def make(
        facts: dict[str, Any] = FACTS,
        rope_layout: str = "parameters",
        config: dict[str, Any] | None = None,
        tensors: dict[str, tuple[int, ...] | None] | None = None,
        dtype: Any = np.float16,
    ) -> Path:
        folder = tmp_path / "Tiny-DFlash"
        folder.mkdir()
        whole = checkpoints.config(facts, rope_layout) | (config or {})
        (folder / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))
        random = np.random.default_rng(0)
        kept = {name: shape for name, shape in (checkpoints.shapes(facts) | (tensors or {})).items() if shape is not None}
        arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in kept.items()}
        checkpoints.write_safetensors(folder / "model.safetensors", {k: v.astype(dtype) for k, v in arrays.items()})
        return folder

    return make


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target that fits the checkpoints."""
    return checkpoints.write_target(tmp_path / "target.gguf")


# Checkpoints: the rotary base, wherever it stands.


@pytest.mark.parametrize("rope_layout", ["top", "parameters", "scaling", "typed"])
@pytest.mark.parametrize("facts", [FACTS, FACTS2], ids=["DFlash", "DFlash2"])
def test_rope_theta_is_read_from_every_layout(make_checkpoint: Make, facts: dict[str, Any], rope_layout: str) -> None:
    read = checkpoint.read(make_checkpoint(facts, rope_layout))
    assert read.rope_theta == 1e7
    assert read.config["rope_theta"] == read.config["rope_parameters"]["rope_theta"] == 1e7
    assert "rope_scaling" not in read.config
    assert read.is_dflash2 == ("selector_rank" in facts)
    assert read.tensors == checkpoints.shapes(facts)


def test_other_rotary_parameters_stay(make_checkpoint: Make) -> None:
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    config = checkpoint.read(make_checkpoint(rope_layout="top", config={"rope_scaling": yarn})).config
    assert config["rope_parameters"] == {
        "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "rope_theta": 1e7
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None in rope_parameters, rope_scaling and at the top"),
        ({"rope_parameters": None}, "rope_theta is None"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0 "),
        ({"rope_parameters": {"rope_theta": "1e7"}}, "rope_theta is '1e7' "),
        ({"rope_theta": 10000.0}, "rope_theta is 10000.0 but rope_parameters.rope_theta is 10000000.0, expected one value"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type is 'yarn' but rope_parameters.rope_type is 'default'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention.rope_theta is 1000000.0 but rope_parameters.sliding_attention.rope_theta is 10000.0",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures is ['Qwen3ForCausalLM'], expected DFlashDraftModel or"),
        ({"architectures": None}, "architectures is None"),
        ({"block_size": None, "dflash_config": {"mask_token_id": 7}}, "lacks target_layer_ids, block_size; expected a draft's"),
        ({"hidden_size": "wide"}, "lacks hidden_size"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": "1"}}, "target_layer_ids is '1', expected a list of layers"),
        ({"architectures": ["DFlash2DraftModel"]}, "lacks dflash_config.conv_kernel_size, dflash_config.conv_group_size"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(make_checkpoint: Make, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        checkpoint.read(make_checkpoint(config=config))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "tensors", "expected"),
    [
        (FACTS, {"layers.0.self_attn.q_proj.bias": (32,)}, "unclaimed tensors: layers.0.self_attn.q_proj.bias"),
        (FACTS, {"extra.weight": (4, 4), "layers.1.mlp.up_proj.weight": None}, "extra.weight; missing tensors: blk.1.ffn_up.weight"),
        (FACTS, {"layers.2.input_layernorm.weight": (32,)}, "unclaimed tensors: layers.2.input_layernorm.weight"),
        (FACTS, {"hidden_norm.weight": None}, "missing tensors: enc.output_norm.weight"),
        (FACTS, {"candidate_selector.hidden_projection.weight": (4, 32)}, "unclaimed tensors: candidate_selector.hidden_projection.weight"),
        (FACTS2, {"layers.1.mlp_conv.base_kernel": None}, "missing tensors: blk.1.ffn_conv_base"),
        (FACTS2, {"markov_head.markov_w1.weight": (8, 4)}, "unclaimed tensors: markov_head.markov_w1.weight"),
        (FACTS, {"model.norm.weight": (32,)}, "model.norm.weight and norm.weight are both output_norm.weight"),
    ],
)  # fmt: skip
def test_tensors_that_the_converter_does_not_take(
    tmp_path: Path, make_checkpoint: Make, target: Path, facts: dict[str, Any], tensors: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelFileError, match="cannot be converted: ") as caught:
        convert(make_checkpoint(facts, tensors=tensors), tmp_path / "new.gguf", target)
    assert expected in str(caught.value)
    assert list(tmp_path.glob("*.gguf")) == [target]


@pytest.mark.parametrize("facts", [FACTS, FACTS2], ids=["DFlash", "DFlash2"])
def test_every_tensor_of_both_formats_is_claimed(facts: dict[str, Any]) -> None:
    names = pinned.claims(checkpoints.shapes(facts), 2)
    assert names == {name: checkpoints.gguf_name(name) for name in checkpoints.shapes(facts)}
    assert layout.problems(names, 2, "selector_rank" in facts) == []


def test_the_converter_leaves_no_byte_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # vendor.py takes ignored files in vendor/llama.cpp for work that is not exported, and refuses to go on.
    shutil.copytree(pinned.source_root() / "gguf-py", tmp_path / "gguf-py", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(pinned, "source_root", lambda: tmp_path)
    pinned.claims(["fc.weight"], 1)
    assert list(tmp_path.glob("gguf-py/**/__pycache__")) == []


def test_pairing_is_checked_before_the_conversion(tmp_path: Path, make_checkpoint: Make) -> None:
    draft, out = make_checkpoint(FACTS2), tmp_path / "new.gguf"
    with pytest.raises(UsageError, match="is a checkpoint, which has no tokenizer, expected --target"):
        convert(draft, out)
    for changes, problem in (
        ({"n_embd": 64}, "reads 2 layers of width 32, the target's hidden size is 64"),
        ({"n_layer": 4}, r"the draft reads layers \[4\], the target has 4 layers"),
        ({"n_tokens": 9}, r"selector_predecessor\.weight has 8 rows, expected the target's 9 tokens"),
    ):
        with pytest.raises(PairingError, match=problem):
            convert(draft, out, checkpoints.write_target(tmp_path / "other.gguf", **changes))


def test_a_targets_folder_is_checked_before_the_conversion(tmp_path: Path, make_checkpoint: Make) -> None:
    draft, out, folder = make_checkpoint(), tmp_path / "new.gguf", tmp_path / "target"
    folder.mkdir()
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read \(No such file or directory\)"):
        convert(draft, out, folder)
    (folder / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 32}}))
    with pytest.raises(ModelFileError, match="lacks hidden_size or num_hidden_layers"):
        convert(draft, out, folder)
    (folder / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 32, "num_hidden_layers": 3}}))
    with pytest.raises(PairingError, match=r"the draft reads layers \[4\], the target has 3 layers"):
        convert(draft, out, folder)


def test_missing_packages_are_one_line(
    tmp_path: Path, make_checkpoint: Make, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DFlashError) as caught:
        convert(make_checkpoint(), tmp_path / "new.gguf", target)
    assert str(caught.value) == (
        f"converting a checkpoint needs torch and transformers, missing here: torch, transformers; "
        f"install them with '{sys.executable} -m pip install torch transformers'"
    )


@pytest.fixture
def damaged(make_checkpoint: Make) -> Callable[[bytes], ModelFileError]:
    """The error that reading a checkpoint with this weight file gives."""
    folder = make_checkpoint()

    def read(content: bytes) -> ModelFileError:
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelFileError) as caught:
            checkpoint.read(folder)
        assert len(str(caught.value).splitlines()) == 1
        return caught.value

    return read


def header(text: str, n: int | None = None) -> bytes:
    return (len(text) if n is None else n).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is damaged"),
        (b"\x00" * 4, "is damaged"),
        (header("{}", 1 << 40), "is damaged (its header would have 1099511627776 bytes)"),
        (header("[1]"), "is damaged"),
        (header("{nonsense"), "is damaged"),
        (header('{"fc.weight": {"dtype": "F16"}}'), "is damaged"),
        (header('{"fc.weight": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}'), "is truncated: 77 bytes, expected 85"),
        (header('{"fc.weight": {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]}}'), "fc.weight has type F8_E4M3, expected F32"),
    ],
)  # fmt: skip
def test_damaged_weights(damaged: Callable[[bytes], ModelFileError], content: bytes, expected: str) -> None:
    assert expected in str(damaged(content))


def test_incomplete_folders(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ModelFileError, match=r"has no model\*\.safetensors, expected a complete checkpoint"):
        checkpoint.read(folder)
    index = {"weight_map": {"fc.weight": "other.safetensors", "norm.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"lacks model-2\.safetensors, expected a complete checkpoint"):
        checkpoint.read(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="holds a list, expected an object"):
        checkpoint.read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"cannot be read \(not JSON\)"):
        checkpoint.read(folder)


# Running the converter, played by a script that does what it would.

FAKE = """
import json, pathlib, shutil, sys, time
if {sleep}:
    print("running", flush=True)
    time.sleep(60)
folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
target = json.loads((pathlib.Path(sys.argv[sys.argv.index("--target-model-dir") + 1]) / "config.json").read_text())
record = dict(argv=sys.argv[1:], name=folder.name, config=config, target=target, linked=(folder / "model.safetensors").is_symlink())
pathlib.Path({record!r}).write_text(json.dumps(record))
out = sys.argv[sys.argv.index("--outfile") + 1]
if {fault}:
    pathlib.Path(out).write_bytes(b"GGUF half")
    print("Traceback (most recent call last):")
    raise ValueError("Can not map tensor")
shutil.copy({result!r}, out)
"""


@pytest.fixture
def fake_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Replace the converter's script, not the table it is asked for; returns the file where the script records its call."""
    root = tmp_path / "fake"
    (root / "conversion").mkdir(parents=True)
    (root / "gguf-py").symlink_to(pinned.source_root() / "gguf-py")

    def make(result: Path, fault: bool = False, sleep: bool = False) -> Path:
        record = tmp_path / "record.json"
        script = FAKE.format(record=str(record), result=str(result), fault=fault, sleep=sleep)
        (root / pinned.SCRIPT).write_text(script)
        monkeypatch.setattr(pinned, "source_root", lambda: root)
        monkeypatch.setattr(pinned, "PACKAGES", ())
        return record

    return make


def bare(tmp_path: Path, **changes: Any) -> Path:
    """What the converter writes for a GGUF target: a draft without a tokenizer."""
    path = checkpoints.write_draft(tmp_path / "draft.gguf", FACTS | changes)
    reader = library.GGUFReader(path)
    values = {k: v for k, v in rewrite.read_values(reader).items() if k != "tokenizer.ggml.tokens"}
    values["tokenizer.ggml.model"] = rewrite.Value("none", KINDS.STRING)
    rewrite.write(reader, tmp_path / "bare.gguf", "dflash", values, {t.name: t.name for t in reader.tensors})
    return tmp_path / "bare.gguf"


def test_a_gguf_targets_tokenizer_is_added(tmp_path: Path, make_checkpoint: Make, target: Path, fake_converter: Make) -> None:
    record, out = fake_converter(bare(tmp_path)), tmp_path / "new.gguf"
    facts = convert(make_checkpoint(rope_layout="top"), out, target, "q8_0").facts
    call = json.loads(record.read_text())
    assert (call["name"], call["linked"]) == ("Tiny-DFlash", True)
    assert call["config"]["rope_parameters"]["rope_theta"] == call["config"]["rope_theta"] == 1e7
    assert call["target"] == {"architectures": [pinned.NO_TOKENIZER], "rope_parameters": {"mrope_section": [4, 2, 2, 0]}}
    assert call["argv"][call["argv"].index("--outtype") + 1] == "q8_0"
    assert (facts.path, facts.tokens, facts.fields["tokenizer.ggml.model"]) == (out, tuple("abcdefgh"), "gpt2")
    assert (facts.fields["tokenizer.ggml.padding_token_id"], facts.fields["tokenizer.ggml.mask_token_id"]) == (1, 7)
    assert list(tmp_path.glob("*.part")) == []


def test_a_targets_folder_goes_to_the_converter(tmp_path: Path, make_checkpoint: Make, fake_converter: Make) -> None:
    record, folder = fake_converter(checkpoints.write_draft(tmp_path / "draft.gguf", FACTS)), tmp_path / "target"
    folder.mkdir()
    config = {"architectures": ["X"], "text_config": {"hidden_size": 32, "num_hidden_layers": 6}}
    (folder / "config.json").write_text(json.dumps(config))
    facts = convert(make_checkpoint(), tmp_path / "new.gguf", folder).facts
    call = json.loads(record.read_text())
    assert call["target"] == config
    assert call["argv"][call["argv"].index("--target-model-dir") + 1] == str(folder)
    assert call["argv"][call["argv"].index("--outtype") + 1] == "auto"
    assert facts.tokens == tuple("abcdefgh")


def test_what_the_converter_does_wrong_is_one_line(
    tmp_path: Path, make_checkpoint: Make, target: Path, fake_converter: Make
) -> None:
    draft, out = make_checkpoint(), tmp_path / "new.gguf"
    for fault, result, problem in (
        (True, FACTS, r"failed on Tiny-DFlash \(exit code 1\): ValueError: Can not map tensor, expected a GGUF file"),
        (False, {"rope.freq_base": 1e6}, r"wrote rope\.freq_base 1000000\.0, expected 1e\+07;"),
        (False, {"block_count": 3}, r"the new file and its source differ in blk\.2\.attn_k\.weight, "),
    ):
        fake_converter(bare(tmp_path, **result), fault=fault)
        with pytest.raises(DFlashError, match=problem):
            convert(draft, out, target)
        assert list(tmp_path.glob("*.part")) == []
        assert not out.exists()


INTERRUPT = """
import sys
from pathlib import Path
from llama_dflash.convert import pinned
pinned.PACKAGES = ()
pinned.source_root = lambda: Path({root!r})
from llama_dflash.cli import main
main(sys.argv[1:])
"""


def test_a_signal_stops_the_converter(tmp_path: Path, make_checkpoint: Make, target: Path, fake_converter: Make) -> None:
    fake_converter(target, sleep=True)
    script = INTERRUPT.format(root=str(tmp_path / "fake"))
    command = [sys.executable, "-c", script, "convert", str(make_checkpoint()), str(tmp_path / "new.gguf")]
    with subprocess.Popen([*command, "-v", "--target", str(target)], stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("converting 25 tensors with the pinned converter, rope_theta 1e+07")
        assert process.stderr.readline() == "running\n"
        process.send_signal(signal.SIGTERM)
        # The converter shares this pipe, which ends when both have.
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGTERM
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Tiny-DFlash", "fake", "target.gguf"]


def test_no_converter_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llama_dflash.__path__", [str(tmp_path)])
    with pytest.raises(DFlashError, match=r"convert_hf_to_gguf\.py is not beside the package"):
        pinned.source_root()
    # As in a wheel.
    for name in ("conversion", "gguf-py"):
        (tmp_path / "_vendor" / "convert" / name).mkdir(parents=True)
    (tmp_path / "_vendor" / "convert" / pinned.SCRIPT).touch()
    assert pinned.source_root() == tmp_path / "_vendor" / "convert"
