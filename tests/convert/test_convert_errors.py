"""What cannot be done is said clearly, and nothing that was there is lost."""

import errno
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from convert_cases import TEXT, contents, convert, write_source

from mlxinfer.convert.files import ShardFile
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.convert.workplace import Workplace, working
from mlxinfer.errors import CheckpointError, ConversionError, InvalidRequestError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a conversion of `source` to `out` that was interrupted."""
    with monkeypatch.context() as patch:
        fill_disk_after(patch, 10)
        with pytest.raises(ConversionError, match="disk is full"):
            convert(source, tmp_path / "out")
    return tmp_path / "out.partial"


def test_a_target_that_exists_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "diary.txt").write_text("dear diary")
    with pytest.raises(ConversionError, match="exists already"):
        convert(source, out)
    assert contents(out) == {"diary.txt": b"dear diary"}


@pytest.mark.parametrize("below", ["", "inner", "a/../inner"])
def test_the_source_is_no_target(source: Path, below: str) -> None:
    before = contents(source)
    with pytest.raises(ConversionError, match="the source"):
        convert(source, source / below)
    assert contents(source) == before


@pytest.mark.parametrize("run", [{}, {"resume": True}, {"restart": True}])
@pytest.mark.parametrize("source", ["x.partial", "x.partial/inner"])
def test_the_work_is_not_done_in_the_source(
    tmp_path: Path, source: str, run: dict[str, bool]
) -> None:
    """`convert x.partial x` would work in x.partial, and delete it in the end."""
    write_source(tmp_path / source)
    (tmp_path / "x.partial" / "journal.jsonl").write_text("")  # however much it looks like ours
    before = contents(tmp_path)
    with pytest.raises(ConversionError, match=r"The source .* would work in that folder"):
        convert(tmp_path / source, tmp_path / "x", run=run)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["diary.txt", "model/weights.safetensors"])
def test_a_folder_of_another_program_is_left_alone(source: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "out.partial" / name
    path.parent.mkdir(parents=True)
    path.write_text("dear diary")
    with pytest.raises(ConversionError, match=r"folder .*out\.partial, but that holds other"):
        convert(source, tmp_path / "out")
    assert contents(tmp_path / "out.partial") == {name: b"dear diary"}


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_the_work_needs_a_folder(source: Path, tmp_path: Path, kind: str) -> None:
    work = tmp_path / "out.partial"
    if kind == "file":
        work.write_text("dear diary")
    else:
        work.symlink_to(tmp_path / "elsewhere")
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
    before = sorted(tmp_path.iterdir())
    match = rf"needs the folder .*out\.partial, but that is a {kind.split()[-1]}"
    with pytest.raises(ConversionError, match=match):
        convert(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("way", ["resume", "restart"])
def test_files_of_others_stay(source: Path, tmp_path: Path, work: Path, way: str) -> None:
    (work / "notes").mkdir()
    (work / "notes" / "diary.txt").write_text("dear diary")
    convert(source, tmp_path / "out", run={way: True})
    assert contents(work) == {"notes/diary.txt": b"dear diary"}


@pytest.mark.parametrize("out", [".", "/", ""])
def test_a_target_has_a_name(source: Path, out: str) -> None:
    with pytest.raises(ConversionError, match="has no name"):
        convert(source, Path(out))


def test_there_must_be_a_folder_to_put_it_into(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="There is no folder"):
        convert(source, tmp_path / "no" / "out")


def test_no_room_is_seen_before_the_writing(source: Path, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "mlxinfer.convert.workplace.shutil.disk_usage", lambda _: usage._replace(free=1000)
    )
    with pytest.raises(ConversionError, match=r"needs .* kB more, and .*disk has 1\.0 kB free"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_disk(source: Path, tmp_path: Path, monkeypatch, code: int) -> None:
    monkeypatch.setattr(os, "mkdir", failing(code))
    with pytest.raises(ConversionError, match="cannot be written"):
        convert(source, tmp_path / "out")


def failing(code: int, right: Callable[..., object] | None = None, after: int = 0) -> Any:
    """A function of the system that works `after` times, and then fails with a code of errno."""
    calls = count()

    def call(*args: object) -> object:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return right(*args)

    return call


def fill_disk_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC, os.pwrite, writes))


@pytest.mark.alike
@pytest.mark.parametrize("writes", [0, 1, 10, 40])
def test_a_full_disk_costs_nothing_that_is_written(
    source: Path, tmp_path: Path, monkeypatch, writes: int
) -> None:
    convert(source, tmp_path / "undisturbed")
    monkeypatch.setattr("mlxinfer.convert.write.CHECKPOINT_BYTES", 1)
    with monkeypatch.context() as patch:
        fill_disk_after(patch, writes)
        with pytest.raises(ConversionError, match=r"disk is full.*--resume"):
            convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    written: list[str] = []
    right = ShardFile.write
    monkeypatch.setattr(
        ShardFile,
        "write",
        lambda self, name, *rest: written.append(name) or right(self, name, *rest),
    )
    convert(source, tmp_path / "out", run={"resume": True})
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert (len(written) < 70) == (writes == 40)


def test_a_full_disk_for_logits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mlxinfer.convert.calibration.logits._logits_of", failing(errno.ENOSPC))
        with pytest.raises(ConversionError, match=r"disk is full.*--resume"):
            convert(source, tmp_path / "out", check_text=TEXT, compares=True)
    assert not list((tmp_path / "out.partial").glob("*.logits"))


def test_an_interrupted_conversion_is_not_thrown_away_unasked(
    source: Path, tmp_path: Path, work: Path
) -> None:
    before = contents(work)
    with pytest.raises(ConversionError, match=r"--resume continues it,\s+--restart"):
        convert(source, tmp_path / "out")
    assert contents(work) == before
    convert(source, tmp_path / "out", run={"restart": True})


@pytest.mark.parametrize("journal", [True, False])
def test_beginning_anew_is_free_to_choose_other_options(
    source: Path, tmp_path: Path, work: Path, journal: bool
) -> None:
    """The old plan goes with the journal, however it went."""
    if not journal:
        (work / "journal.jsonl").unlink()
    convert(source, tmp_path / "out", "8bit", run={"restart": journal})
    convert(source, tmp_path / "undisturbed", "8bit")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.alike
@pytest.mark.parametrize(
    ("line", "begun"),
    [
        *((line, False) for line in (b"[1]", b"null", b"{}", bytes(50), b"\xff", b"[" * 99_999)),
        (b"[1]", True),
        (b'{"shard": "model.safetensors"}', True),
        (b'{"shard": "model.safetensors", "checked": [1]}', True),
        (b'{"formats": {"a": "9bits"}}', True),
        (b'{"formats": ["a"]}', True),
        (b'{"tensor": ["a"]}', True),
        (b'{"tensor": "model.norm.weight", "error": {}}', True),
        (b'{"tensor": "model.norm.weight", "error": {"a": 1}, "checksums": []}', True),
    ],
)
def test_a_damaged_journal_is_named_and_kept(
    source: Path, tmp_path: Path, work: Path, line: bytes, begun: bool
) -> None:
    journal = work / "journal.jsonl"
    damaged = (journal.read_bytes() if begun else b"") + line + b"\n"
    journal.write_bytes(damaged)
    with pytest.raises(ConversionError, match=r"journal\.jsonl is damaged, .* use --restart"):
        convert(source, tmp_path / "out", run={"resume": True})
    assert journal.read_bytes().startswith(damaged)
    if begun:  # what is there before a restart is not read
        convert(source, tmp_path / "out", run={"restart": True})


@pytest.mark.ci
def test_damaged_logits_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(folder: Path) -> None:
        raise KeyboardInterrupt

    options = {"calibration": TEXT, "target_bpw": 6.0, "compares": True}
    with monkeypatch.context() as patch:
        patch.setattr("mlxinfer.convert.run.open_folder", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **options)
    for name in ("short.logits", "long.logits"):
        path = tmp_path / "out.partial" / name
        whole = path.read_bytes()
        for data in (b"", b"PK broken", bytes(5000), whole[:-100]):
            path.write_bytes(data)
            with pytest.raises(ConversionError, match=rf"{name} is damaged, .* use --restart"):
                convert(source, tmp_path / "out", **options, run={"resume": True})
        path.write_bytes(whole)
    path.write_bytes(b"")  # what is there before a restart is not read
    convert(source, tmp_path / "out", **options, run={"restart": True})


def test_other_options_do_not_go_on(source: Path, tmp_path: Path, work: Path) -> None:
    with pytest.raises(ConversionError, match=r"other options \(recipe: 4bit-g32, now 8bit"):
        convert(source, tmp_path / "out", "8bit", run={"resume": True})


def test_a_second_conversion_to_a_folder_is_refused(source: Path, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "out")
    with working(place, resume=False, restart=False):
        with pytest.raises(ConversionError, match="Another process"):
            convert(source, tmp_path / "out")
        assert place.root.exists()
    assert not place.root.exists()


def changed(source: Path, change: Callable[[dict[str, mx.array]], None]) -> Path:
    path = source / "model.safetensors"
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    mx.eval(arrays)
    change(arrays)
    mx.save_safetensors(str(path), arrays)
    return source


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("recipe", "name", "value", "check_tensors"),
    [
        ("4bit-g32", UP, "nan", False),
        ("4bit-g32", NORM, "nan", True),
        ("mxfp4", UP, "-inf", True),
        ("fp16", UP, "nan", True),
        ("bf16", UP, "-inf", False),
        ("bf16", NORM, "nan", False),
    ],
)
def test_numbers_that_are_none_end_a_conversion(
    source: Path, tmp_path: Path, recipe: str, name: str, value: str, check_tensors: bool
) -> None:
    def spoil(arrays: dict[str, mx.array]) -> None:
        arrays[name][-1] = float(value)

    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or infinity"):
        convert(changed(source, spoil), tmp_path / "out", recipe, check_tensors=check_tensors)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("recipe", "dtype"), [("fp16", None), ("4bit-g32", "float16")])
def test_numbers_beyond_16_bits(
    source: Path, tmp_path: Path, recipe: str, dtype: str | None
) -> None:
    def enlarge(arrays: dict[str, mx.array]) -> None:
        arrays[UP][0, 0] = 1e6

    opened = open_source(changed(source, enlarge))
    options = ConversionOptions(recipe=make_recipe(recipe, dtype=dtype))
    with pytest.raises(CheckpointError, match=r"up_proj.*too large for float16: choose bfl"):
        Conversion(opened, tmp_path / "out", options).run()
    convert(source, tmp_path / "other", "bf16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: a.pop(UP),
            r"source: Tensor 'model.layers.1.mlp.up_proj.weight' \(96.*is missing",
        ),
        (lambda a: a.update({UP: a[UP][:32]}), r"has shape \(32, 64\); expected \(96, 64\)"),
        (lambda a: a.update({"model.vision.weight": a[UP]}), "does not: 'model.vision.weight'"),
    ],
)
def test_tensors_are_those_of_the_architecture(
    source: Path, tmp_path: Path, change: Callable[[dict[str, mx.array]], None], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(changed(source, change), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_too_little_memory_says_how_much_is_needed(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"max_memory is 50 MB, but about 1\d\d MB"):
        convert(source, tmp_path / "out", max_memory=50_000_000)
    assert not (tmp_path / "out.partial").exists()
