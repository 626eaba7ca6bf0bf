"""Laws of commits to the Hub: one commit or none, never repeated, compared afterwards, and no fault is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, Hub, hub_server

from stillroom.core.errors import AddressUnusable, CannotSave, ConfigError, StillroomError, masked
from stillroom.core.files import FileSum, sum_of_bytes, sum_of_file
from stillroom.core.hub import Contents, HubStore, Repository
from stillroom.core.remote import local_copy

Files = dict[str, tuple[Contents, FileSum]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server(monkeypatch) as server:
        yield server


@pytest.fixture
def repository(hub: Hub) -> Repository:
    repository = Repository("org/a")
    repository.create(private=True)
    hub.requests.clear()
    return repository


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A small file from memory and a large one from the disk."""
    path, card = tmp_path / "model.safetensors", b"---\ntags: []\n---\n"
    path.write_bytes(b"weights" * 1000)
    return {"README.md": (card, sum_of_bytes(card)), "deep/model.safetensors": (path, sum_of_file(path))}


def held(files: Files) -> dict[str, bytes]:
    return {name: one if isinstance(one, bytes) else one.read_bytes() for name, (one, _sum) in files.items()}


def test_files_are_one_commit_and_the_same_files_are_none(hub: Hub, repository: Repository, files: Files) -> None:
    commit = repository.send(files, "first")
    repo = hub.repos["org/a"]
    assert commit == repo.branches["main"] and held(files).items() <= repo.head().items()
    assert repository.send(files, "again") == commit and repo.titles == ["initial commit", "first"]
    repository.send({}, "without it", remove=["README.md", "never there"])
    assert "README.md" not in repo.head() and "deep/model.safetensors" in repo.head()


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: Hub, repository: Repository, files: Files) -> None:
    def lose_one(_method: str, path: str) -> Any:
        return "drop" if "/commit/" in path and hub.count("/commit/") == 1 else None

    hub.after = lose_one
    repository.send(files, "first")
    assert hub.repos["org/a"].titles == ["initial commit", "first"] and hub.count("/commit/") == 1


def test_a_branch_that_moves_meanwhile_keeps_what_the_other_wrote(
    hub: Hub, repository: Repository, files: Files
) -> None:
    repo = hub.repos["org/a"]

    def other_is_first(_method: str, path: str) -> Any:
        if "/commit/" in path and len(repo.titles) == 1:
            repo.commit("main", {**repo.head(), "LICENSE": b"theirs"}, "other")

    hub.fault = other_is_first
    repository.send(files, "ours")
    assert repo.titles == ["initial commit", "other", "ours"] and repo.head()["LICENSE"] == b"theirs"
    assert held(files).items() <= repo.head().items()


@pytest.mark.parametrize("part", ["/preupload/", "/objects/batch", "/large/", "/commit/", "/tree/", "/revision/"])
@pytest.mark.parametrize("fault", ["drop", (429, "slow down"), (500, "broken"), (504, "late")])
def test_the_hub_may_fail_at_any_request_and_the_next_try_succeeds(
    hub: Hub, repository: Repository, files: Files, part: str, fault: Any
) -> None:
    hub.fault = lambda _method, path: fault if part in path and hub.count(part) <= 2 else None
    repository.send(files, "first")
    assert hub.repos["org/a"].titles == ["initial commit", "first"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_repeated_and_says_which_key(
    hub: Hub, repository: Repository, files: Files, status: int
) -> None:
    hub.fault = lambda _method, path: (status, f"no: {TOKEN}") if "/commit/" in path else None
    with pytest.raises(CannotSave) as refused:
        repository.send(files, "first")
    assert hub.count("/commit/") == 1 and "HF_TOKEN" in str(refused.value) and TOKEN not in str(refused.value)
    assert hub.repos["org/a"].titles == ["initial commit"]


def test_a_file_that_the_commit_leaves_out_is_not_taken_for_sent(
    hub: Hub, repository: Repository, files: Files
) -> None:
    hub.ignored = ".safetensors"
    with pytest.raises(CannotSave, match=r"model\.safetensors"):
        repository.send(files, "first")


def test_a_hub_that_stays_away_ends_with_24(hub: Hub, repository: Repository, files: Files) -> None:
    hub.fault = lambda _method, path: "drop" if "/large/" in path else None
    with pytest.raises(CannotSave) as failed:
        repository.send(files, "first")
    assert failed.value.exit_code == 24 and hub.repos["org/a"].titles == ["initial commit"]


def test_a_token_is_needed_that_the_hub_knows_and_that_may_write(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = Repository("org/a")
    repository.check_token()
    hub.role = "read"
    with pytest.raises(ConfigError):
        repository.check_token()
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    with pytest.raises(AddressUnusable):
        repository.check_token()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(AddressUnusable, match="oken"):
        repository.check_token()


@pytest.mark.parametrize("name", ["name", "a/b/c", "../b", "a/..", "a/b c", "a/b@c", "", "hf://a/b"])
def test_what_is_not_the_name_of_a_repository_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Repository(name)


@pytest.mark.parametrize("rest", ["datasets/a/b", "spaces/a/b", "name", "a/b@" + "0" * 40, "a/b@x y"])
def test_a_run_is_kept_on_a_branch_of_a_model_repository_only(rest: str) -> None:
    with pytest.raises(ConfigError):
        HubStore(f"hf://{rest}")


def test_a_repository_in_another_s_name_is_refused(hub: Hub) -> None:
    with pytest.raises(CannotSave):
        Repository("strangers/a").create(private=True)


def test_a_copy_follows_a_file_that_changed_and_kept_its_size(
    hub: Hub, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for contents in (b"one", b"two"):
        repository.send({"a.txt": (contents, sum_of_bytes(contents))}, "text")
        assert (local_copy("hf://org/a") / "a.txt").read_bytes() == contents


@pytest.mark.parametrize("text", ["hf_" + "aB3" * 12, "hf_oauth_" + "x" * 40 + ".yz-_.q"])
def test_what_looks_like_a_token_is_masked_wherever_it_is_from(text: str) -> None:
    assert text not in masked(f"see {text}: no") and masked(f"see {text}: no").endswith(": no")
    assert text not in str(StillroomError(f"Bearer {text}", advice=[text]))
    assert masked("hf_hub_download of hf_internal_testing") == "hf_hub_download of hf_internal_testing"
