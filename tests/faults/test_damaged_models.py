"""Damaged, foreign and hostile model folders: each ends at the start with a reason, and none of them runs code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, LlavaConfig, Qwen3VLConfig, T5Config

import tiny
from stillroom.assess import assess
from stillroom.cli import main
from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.errors import BrokenAtStart, ConfigError, StillroomError
from stillroom.models import LoadedModel, find, load_student, open_student, open_teacher

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("sound") / "model", width=16, num_layers=1)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound model that a test may damage."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def ask(folder: Path) -> LoadedModel:
    return open_teacher(TeacherConfig(model=str(folder)), torch.float32)


def train(folder: Path) -> LoadedModel:
    return open_student(StudentConfig(model=str(folder)), tiny.tokenizer(), seed=0)


def refused(folder: Path, *words: str, how: Callable[[Path], LoadedModel] = ask, code: int = 20) -> StillroomError:
    with pytest.raises(StillroomError) as caught:
        how(folder)
    error = caught.value
    assert error.exit_code == code, error
    assert error.advice, "every end says what to try"
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"
    return error


def edit(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, **values}))


def rewrite(folder: Path, change: Change) -> None:
    """Load the tensors, change the table, save it again."""
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# -- weights ---------------------------------------------------------------------------------------------


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def broken_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "cut short": cut_short,
    "a header cut short": broken_header,
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "something else": lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(4000)),
    "a page of a web server": lambda folder: (folder / "model.safetensors").write_text("<html>404</html>" * 50),
    "a pointer of git lfs": lambda folder: (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 400\n"
    ),
}


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights_that_are_no_safetensors_are_refused(
    folder: Path, damage: str, how: Callable[[Path], LoadedModel]
) -> None:
    WEIGHTS[damage](folder)
    refused(folder, str(folder), how=how)


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_weight_that_the_file_lacks_is_never_drawn_at_random(
    folder: Path, name: str, how: Callable[[Path], LoadedModel]
) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder, "misses", name, how=how)


@pytest.mark.parametrize("how", [ask, train])
def test_a_file_without_tensors_is_refused(folder: Path, how: Callable[[Path], LoadedModel]) -> None:
    rewrite(folder, lambda tensors: tensors.clear())
    refused(folder, "misses", "and 8 more", how=how)


def test_weights_that_the_model_has_no_place_for_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(4, 4)}))
    refused(folder, "no such weight", "model.layers.7.mlp.up_proj.weight")


def test_weights_of_another_size_are_refused_with_both_sizes(folder: Path) -> None:
    edit(folder, vocab_size=400)
    refused(folder, "another size", "lm_head.weight", "320 x 16", "400 x 16")


def test_constants_of_an_older_file_are_said_and_harmless(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.masked_bias": torch.tensor(-1e4)}))
    assert "masked_bias" in " ".join(ask(folder).notes)


def test_a_file_of_the_body_alone_loads_where_the_head_is_tied(tmp_path: Path) -> None:
    """As the first GPT-2 files are: names without their prefix, masks among the weights, no head."""
    AutoModelForCausalLM.from_config(tiny.config("gpt2", width=16, num_layers=1)).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None))
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = ask(tmp_path)
    assert torch.equal(found.head.weight, tensors["wte.weight"]) and found.anatomy.is_tied


def test_rotary_tables_of_an_older_file_are_no_weights(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert ask(folder).is_described


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = tiny.config("llama", width=16, num_layers=1)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    assert ask(tmp_path / "model").anatomy.is_tied


def test_a_head_of_its_own_is_not_lost_to_a_flag_that_ties(folder: Path) -> None:
    """The file has two different tables and the configuration says they are one."""
    held = load_file(folder / "model.safetensors")["lm_head.weight"]
    edit(folder, tie_word_embeddings=True)
    assert torch.equal(ask(folder).head.weight, held)


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    refused(folder, "not finite", "model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_weights_stored_as_integers_are_refused(folder: Path, dtype: torch.dtype) -> None:
    """Codes of a quantised model without its recipe would be read as numbers."""

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = (tensors["lm_head.weight"] * 100).to(dtype)

    rewrite(folder, quantise)
    refused(folder, "lm_head.weight")


# -- what must still load --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_student_is_float32_whatever_its_file_holds(folder: Path, dtype: torch.dtype) -> None:
    before = load_file(folder / "model.safetensors")["lm_head.weight"]
    rewrite(folder, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    found = train(folder)
    assert {parameter.dtype for parameter in found.network.parameters()} == {torch.float32}
    assert torch.equal(found.head.weight, before.to(dtype).float())


def test_shards_and_metadata_load_like_one_file(folder: Path, tmp_path: Path) -> None:
    one = ask(folder)
    one.network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    many = ask(tmp_path / "shards")
    for mine, theirs in zip(one.network.parameters(), many.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    save_file(
        load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"by": "x", "format": "pt"}
    )
    assert torch.equal(ask(folder).head.weight, one.head.weight)


def test_a_model_in_half_precision_comes_back_from_its_trial_bit_for_bit(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    found = open_teacher(TeacherConfig(model=str(folder)), torch.float16)
    assert found.is_described
    for name, value in found.network.state_dict().items():
        assert torch.equal(value, held[name].half()), name
    buffers = {name: buffer.dtype for name, buffer in found.network.named_buffers()}
    assert set(buffers.values()) == {torch.float32}, "rotary frequencies are kept as they were loaded"


# -- configuration ---------------------------------------------------------------------------------------


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def setting(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, **values)


CONFIGURATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken JSON": (write("config.json", '{"model_type": "llama",'), "not valid JSON"),
    "not UTF-8": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), "not valid JSON"),
    "empty": (write("config.json", ""), "not valid JSON"),
    "a list": (write("config.json", '["llama"]'), "holds a list"),
    "missing": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no kind": (write("config.json", '{"hidden_size": 16}'), "names no model_type"),
    "an unknown kind": (setting(model_type="lama"), "'lama'"),
    "a kind that is no name": (setting(model_type=7), "names no model_type"),
    "a word for a number": (setting(hidden_size="wide"), "hidden_size"),
    "a negative size": (setting(hidden_size=-16), ""),
    "a size of nothing": (setting(hidden_size=0), ""),
    "no layers": (setting(num_hidden_layers=0), ""),
    "no heads": (setting(num_attention_heads=0), ""),
    "a negative vocabulary": (setting(vocab_size=-1), ""),
    "heads that do not divide": (setting(num_attention_heads=3, num_key_value_heads=2), ""),
    "an unknown activation": (setting(hidden_act="relou"), "relou"),
    "an unknown rope": (setting(rope_parameters={"rope_type": "spiral"}), ""),
    "an unknown dtype": (setting(dtype="float17"), "float17"),
    "a broken generation": (write("generation_config.json", "{"), ""),
    "a list for a generation": (write("generation_config.json", "[1]"), ""),
}


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("damage", CONFIGURATIONS)
def test_a_damaged_configuration_is_refused(folder: Path, damage: str, how: Callable[[Path], LoadedModel]) -> None:
    change, word = CONFIGURATIONS[damage]
    change(folder)
    refused(folder, word, how=how)


@pytest.mark.parametrize("damage", [name for name in CONFIGURATIONS if "generation" not in name])
def test_a_damaged_configuration_is_refused_for_a_random_student(folder: Path, damage: str) -> None:
    change, word = CONFIGURATIONS[damage]
    change(folder)
    (folder / "model.safetensors").unlink()
    refused(folder, word, how=train)


def test_a_configuration_that_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json")


# -- tokenizers ------------------------------------------------------------------------------------------

TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken JSON": (write("tokenizer.json", "{"), ""),
    "empty": (write("tokenizer.json", ""), ""),
    "a list": (write("tokenizer.json", "[]"), ""),
    "no model": (write("tokenizer.json", "{}"), ""),
    "a broken setting": (write("tokenizer_config.json", "{"), ""),
    "a list for settings": (write("tokenizer_config.json", "[]"), ""),
    "missing": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "has no tokenizer"),
}


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_damaged_tokenizer_is_refused(folder: Path, damage: str) -> None:
    change, word = TOKENIZERS[damage]
    change(folder)
    refused(folder, "tokenizer", str(folder), word)


def test_a_tokenizer_of_an_unknown_class_is_the_table_in_its_file(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    assert ask(folder).tokenizer.get_vocab() == tiny.tokenizer().get_vocab()


def test_a_tokenizer_larger_than_the_embeddings_is_refused_with_both_numbers(folder: Path) -> None:
    tiny.tokenizer(400).save_pretrained(folder)
    highest = max(tiny.tokenizer(400).get_vocab().values())
    error = refused(folder, f"token id {highest:,}", "320 embeddings", code=2)
    assert isinstance(error, ConfigError)


# -- pickles ---------------------------------------------------------------------------------------------


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path that appears when a pickle was read. torch's reader is watched as well: it must not even be asked."""

    def never(*_arguments: Any, **_options: Any) -> Any:
        (tmp_path / "sprung").mkdir()

    monkeypatch.setattr(torch, "load", never)
    return tmp_path / "sprung"


def set_trap(path: Path, trap: Path) -> None:
    path.write_bytes(pickle.dumps({"lm_head.weight": Trap(trap)}))


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("shard", ["../outside.bin", "outside.bin", "/absolute.bin", "a/../../outside.safetensors"])
def test_an_index_reaches_nothing_but_safetensors_of_its_folder(
    folder: Path, trap: Path, shard: str, how: Callable[[Path], LoadedModel]
) -> None:
    for place in (folder / "outside.bin", folder.parent / "outside.bin", folder.parent / "outside.safetensors"):
        set_trap(place, trap)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, shard, how=how)
    assert not trap.exists()


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt"]
)
def test_pickled_weights_are_refused_by_name(
    folder: Path, trap: Path, name: str, how: Callable[[Path], LoadedModel]
) -> None:
    """A student folder with pickled weights alone is not one without weights: it must not begin at random."""
    (folder / "model.safetensors").unlink()
    set_trap(folder / name, trap)
    refused(folder, name, "pickle", how=how)
    assert not trap.exists()


def test_pickles_beside_safetensors_are_left_alone(folder: Path, trap: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "spk_dict.pt"):
        set_trap(folder / name, trap)
    assert ask(folder).is_described and not trap.exists()


def test_a_configuration_cannot_name_its_weights(folder: Path, trap: Path) -> None:
    set_trap(folder / "adapter_model.bin", trap)
    edit(folder, transformers_weights="adapter_model.bin")
    refused(folder, "adapter_model.bin")
    assert not trap.exists()


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": 7}']
)
def test_a_broken_index_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "model.safetensors.index.json")


def test_shards_that_are_not_there_are_named(folder: Path, tmp_path: Path) -> None:
    ask(folder).network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(tmp_path / "shards")
    lost = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    lost.unlink()
    refused(tmp_path / "shards", lost.name)


# -- adapters --------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter folder, and in the place of peft what says that it was asked: it is an optional part."""
    module = ModuleType("peft")
    merged = SimpleNamespace(merge_and_unload=lambda: None)

    class PeftModel:
        @staticmethod
        def from_pretrained(model: Any, _path: str) -> Any:
            merged.merge_and_unload = lambda: model
            return merged

    module.PeftModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", module)
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    (path / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("how", [ask, train])
def test_an_adapter_is_merged_into_its_base(adapter: Path, folder: Path, how: Callable[[Path], LoadedModel]) -> None:
    found = how(adapter)
    assert torch.equal(found.head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    assert any(str(folder) in note for note in found.notes)


def test_a_pickled_adapter_is_refused(adapter: Path, trap: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    set_trap(adapter / "adapter_model.bin", trap)
    refused(adapter, "adapter_model.bin", "pickle")
    assert not trap.exists()


def test_a_pickled_base_of_an_adapter_is_refused(adapter: Path, folder: Path, trap: Path) -> None:
    (folder / "model.safetensors").unlink()
    set_trap(folder / "pytorch_model.bin", trap)
    refused(adapter, "pytorch_model.bin", "pickle")
    assert not trap.exists()


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_an_adapter_without_a_base_is_refused(adapter: Path, config: str) -> None:
    (adapter / "adapter_config.json").write_text(config)
    refused(adapter, "adapter_config.json")


# -- models of another kind ------------------------------------------------------------------------------


def test_an_encoder_decoder_is_called_one(folder: Path) -> None:
    T5Config(vocab_size=320, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).save_pretrained(folder)
    for how in (ask, train):
        refused(folder, "encoder-decoder model (t5)", how=how)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlavaConfig, ("llava", "its text part is a llama", "LlamaForCausalLM")),
        (Qwen3VLConfig, ("qwen3_vl", "no causal")),
    ],
)
def test_a_model_that_sees_is_called_one(folder: Path, config: Any, words: tuple[str, ...]) -> None:
    config().save_pretrained(folder)
    for how in (ask, train):
        refused(folder, "vision-language", "text-only", *words, how=how)


def test_an_encoder_is_not_taken_for_a_decoder(tmp_path: Path) -> None:
    """BERT loads as a causal model and answers like one, with the targets in sight."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    for how in (ask, train):
        refused(tmp_path / "bert", "not causal", "BertLMHeadModel", how=how)
    edit(tmp_path / "bert", is_decoder=True)
    assert not ask(tmp_path / "bert").is_described


# -- names -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def snapshot_download(name: str, **_options: Any) -> str:
        asked.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("stillroom.models.source.snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    "name",
    ["runs/x", "runs/x/student", "./x", "../x", "/nowhere/x", "~/nowhere", "runs/", "model/", "C:\\models\\x", "a\\b",
     "x.safetensors", "org/model.gguf", "runs/first/student"],
)  # fmt: skip
def test_a_name_of_a_path_is_never_asked_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: list[str], name: str
) -> None:
    (tmp_path / "runs" / "x1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenAtStart) as caught:
        load_student(StudentConfig(model=name), seed=0)
    assert name in str(caught.value) and caught.value.advice and not no_hub


def test_a_misspelt_folder_is_answered_with_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "teacher").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenAtStart, match="did you mean runs/teacher"):
        find("runs/techer")


@pytest.mark.parametrize("name", ["gpt2", "some-org/some-model", "Org_1/model.v2-7b"])
def test_a_hub_that_cannot_be_reached_is_asked_once(no_hub: list[str], name: str) -> None:
    with pytest.raises(BrokenAtStart, match="no route to host") as caught:
        load_student(StudentConfig(model=name), seed=0)
    assert no_hub == [name] and "network" in str(caught.value)


def test_a_model_of_the_hub_is_a_folder_like_any_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache links its files: a link out of the folder is no escape. Pickles are not asked for."""
    snapshot, asked = tmp_path / "snapshot", []
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)

    def snapshot_download(name: str, *, allow_patterns: list[str], **_options: Any) -> str:
        asked.extend(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("stillroom.models.source.snapshot_download", snapshot_download)
    found = open_teacher(TeacherConfig(model="org/name"), torch.float32)
    assert found.is_described and "model.safetensors" in asked
    assert not any("bin" in pattern or "py" in pattern for pattern in asked)


def test_a_model_in_the_hub_s_cache_is_found_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as the hub's own library lays it out: a ref, a snapshot of links, and the files they lead to."""
    home, commit = tmp_path / "hub" / "models--org--name", "0123456789" * 4
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (home / part).mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    for number, path in enumerate(folder.iterdir()):
        shutil.copy(path, home / "blobs" / f"{number:040d}")
        (home / "snapshots" / commit / path.name).symlink_to(home / "blobs" / f"{number:040d}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = open_teacher(TeacherConfig(model="org/name"), torch.float32)
    assert torch.equal(found.head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    with pytest.raises(BrokenAtStart, match="cannot fetch org/other"):
        open_teacher(TeacherConfig(model="org/other"), torch.float32)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    refused(folder / "model.safetensors", "is a file")


def test_the_folder_of_a_run_points_to_its_student(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"config": {}}')
    (tmp_path / "events.jsonl").write_text("")
    refused(tmp_path, "folder of a run", str(tmp_path / "student"), how=lambda path: train(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="everything may be read")
def test_a_folder_without_permission(folder: Path) -> None:
    folder.chmod(0)
    try:
        refused(folder, "permission")
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("command", ["eval", "generate", "distill"])
def test_every_command_ends_with_code_20(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    cut_short(folder)
    (folder.parent / "text.txt").write_text("the still room keeps spirits and waters\n" * 50)
    data = str(folder.parent / "text.txt")
    words = {
        "eval": ["--model", str(folder), "--data", data],
        "generate": [str(folder), "--prompt", "the"],
        "distill": ["--teacher", str(folder), "--data", data, "--out", str(folder.parent / "run")],
    }
    with pytest.raises(SystemExit) as caught:
        main([command, *words[command], "--device", "cpu"])
    assert caught.value.code == 20
    assert "cannot use the weights" in " ".join(capsys.readouterr().err.split())


def test_evaluation_refuses_what_training_refuses(folder: Path, world: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(BrokenAtStart, match=r"misses lm_head\.weight"):
        assess(str(folder), str(world / "train.jsonl"), device="cpu")
