"""`paceline run --resume` before anything starts: what the command repeats, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from paceline.checkpoints.buckets import upload
from paceline.cli import app, resumable
from paceline.cli.options import OptionalValues
from paceline.errors import ConfigurationError
from paceline.run.job import CHECKPOINTS, ResumedFrom
from paceline.run.job_options import make_job
from paceline.run.resuming import can_resume, described, keep_source
from paceline.trace.report import ReportedSetting, RunFile, read_run_file, write_run_file
from paceline.trust import signature_of
from paceline.wire.secure import write_secret
from tests.support.sharded import LINEAGE, Net, Shards, model_of

RUN = Path("run")
SCRIPT = "import paceline\nrate = 0.05\nprint(rate)\n"


@pytest.fixture(autouse=True)
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed after a checkpoint."""
    monkeypatch.chdir(tmp_path)
    RUN.mkdir()
    Path("train.py").write_text(SCRIPT)
    keep_source(SCRIPT, RUN)
    file = RunFile(
        version="1",
        begun_at="2026-01-01T00:00:00+00:00",
        command="paceline run --workers 3 --servers 1 train.py --epochs 10",
        folder=str(tmp_path),
        settings=(ReportedSetting("--checkpoint-every", "1min", True),),
        sync="bsp",
        workers=3,
        servers=1,
        shards=1,
        lineage=LINEAGE,
    )
    write_run_file(file, RUN)
    write_checkpoint(1)


def write_checkpoint(number: int) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = model_of(net, [optimizer])
    Shards(model, 1, net).write(RUN / CHECKPOINTS, number, further=described(RUN))


def resume(*arguments: str, run: str = str(RUN)) -> Result:
    return CliRunner().invoke(app, ["run", "--resume", run, "--dry-run", *arguments], env={"COLUMNS": "200"})


def refusal(*arguments: str) -> str:
    """Return why a run is not resumed, which leaves its directory as it is."""
    before = sorted(RUN.rglob("*"))
    result = resume(*arguments)
    assert isinstance(result.exception, ConfigurationError), result.output
    assert sorted(RUN.rglob("*")) == before
    return str(result.exception)


def finish() -> None:
    (RUN / "summary.json").write_text(json.dumps({"ended": "finished"}))


def test_the_command_repeats_the_options_and_the_script_unless_they_are_given_anew() -> None:
    shown = resume("--workers", "2").output
    assert "train.py --epochs 10" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("workers")] == ["2"]
    assert "train.py --epochs 20" in resume("train.py", "--epochs", "20").output


def test_the_paths_of_the_earlier_command_refer_to_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[list[str]] = []
    parse = OptionalValues.parse_args

    def noted(self: OptionalValues, ctx: Any, args: list[str]) -> list[str]:
        used.append(args.copy())
        return parse(self, ctx, args)

    rewrite(command="paceline run --checkpoint-dir ckpts --tensorboard=logs --seed 1 train.py")
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        monkeypatch.chdir(folder)
        with monkeypatch.context() as patched:
            patched.setattr(OptionalValues, "parse_args", noted)
            resume(str(tmp_path / "train.py"), run=str(tmp_path / RUN))
    repeated = [args[:5] for args in used if "--seed" in args]
    assert repeated == [
        ["--checkpoint-dir", "ckpts", "--tensorboard=logs", "--seed", "1"],
        ["--checkpoint-dir", f"{tmp_path}/ckpts", f"--tensorboard={tmp_path}/logs", "--seed", "1"],
    ]


def test_only_options_that_the_user_gives_after_the_script_are_warned_of() -> None:
    rewrite(command="paceline run -- train.py --workers 4")
    warning = "options after train.py are passed to the script: --workers"
    assert warning not in " ".join(resume().stderr.split())
    assert warning in " ".join(resume("train.py", "--workers", "5").stderr.split())


def test_a_run_without_a_whole_checkpoint_is_not_resumed() -> None:
    (RUN / CHECKPOINTS / LINEAGE / "000001" / "manifest.json").unlink()
    words = refusal()
    assert "cannot be resumed, because there is no whole checkpoint in" in words
    assert "Checkpoint 1 is not used" in words
    (RUN / CHECKPOINTS).rename("elsewhere")
    assert "The run had --checkpoint-every 1min. Start the run again without --resume." in refusal()


def test_a_changed_script_is_refused_with_the_first_difference_unless_the_user_accepts_it() -> None:
    Path("train.py").write_text(SCRIPT.replace("0.05", "0.01"))
    words = refusal()
    assert (
        "train.py has changed since the run began: line 2 was 'rate = 0.05', and is now 'rate = 0.01'"
        in words
    )
    assert "add --accept-changes" in words
    assert resume("--accept-changes").exit_code == 0
    (RUN / "script.py").unlink()
    assert "it is unknown whether the script train.py has changed since the run began" in resume().stderr


def test_a_finished_run_is_resumed_only_if_its_script_is_given_again() -> None:
    finish()
    assert "the run in run has finished, so nothing is left to resume" in refusal()
    shutil.copytree(RUN, "my runs/1")
    words = str(resume(run="my runs/1").exception)
    assert "give the script with other arguments: paceline run --resume 'my runs/1' SCRIPT ..." in words
    assert resume("train.py", "--epochs", "20").exit_code == 0


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """The URL of a bucket with a checkpoint of the run, whose directory is lost."""
    url = f"file://{tmp_path}/bucket/trial"
    file = read_run_file(RUN)
    assert file is not None
    write_run_file(msgspec.structs.replace(file, settings=(ReportedSetting("--checkpoint-dir", url),)), RUN)
    write_checkpoint(2)
    upload(RUN / CHECKPOINTS / LINEAGE / "000002", url)
    shutil.rmtree(RUN)
    return url


def shown(result: Result) -> dict[str, str]:
    assert result.exit_code == 0, result.output
    return dict(line.strip().split(maxsplit=1) for line in result.stdout.splitlines())


def test_a_bucket_suffices_to_resume_a_run(bucket: str) -> None:
    found = shown(resume(run=bucket))
    assert found["command"].endswith("train.py --epochs 10")
    assert found["workers"] == "3"
    assert Path("runs", "trial", CHECKPOINTS, LINEAGE, "000002", "manifest.json").exists()
    assert Path("runs", "trial", "script.py").read_text() == SCRIPT
    shown(resume("--run-dir", "elsewhere", run=bucket))
    assert Path("elsewhere", "run.json").exists()
    job = make_job(workers=1, resume=bucket, run_dir="third", dry_run=True)
    path = str(Path("third", CHECKPOINTS, LINEAGE, "000002").absolute())
    assert job.resumed == ResumedFrom(path, lock=0)
    assert (job.run_dir, job.checkpoint_dir, job.seed) == (str(Path("third").absolute()), bucket, 7)


def test_a_bucket_without_a_whole_checkpoint_and_the_directory_of_another_run_are_refused(
    bucket: str,
) -> None:
    empty = f"{bucket}-2"
    result = resume(run=empty)
    assert str(result.exception) == (
        f"resume is {empty!r}, but there is no whole checkpoint. Name the URL that was given as --checkpoint-dir."
    )
    assert not Path("runs").exists()
    shown(resume(run=bucket))
    shown(resume(run=bucket))  # the directory is that of this run
    other = bucket.replace("bucket", "other")
    upload(Path("runs", "trial", CHECKPOINTS, LINEAGE, "000002"), other)
    result = resume(run=other)
    assert (
        "but runs/trial is the directory of a run with checkpoints elsewhere; name another directory"
        in str(result.exception)
    )


@pytest.fixture
def another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user has another key than whoever has started the run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))


def rewrite(**changes: object) -> None:
    """Change run.json, and sign it, as whoever has started the run could."""
    file = read_run_file(RUN)
    assert file is not None
    write_run_file(msgspec.structs.replace(file, **changes), RUN)


PLANTED = "paceline run --import planted --tensorboard /elsewhere train.py --epochs 10"


def test_what_a_directory_of_somebody_else_says_is_not_done_unless_the_user_wants_it(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("planted.py").write_text("from pathlib import Path\nPath('ran').touch()")
    rewrite(command=PLANTED)
    request.getfixturevalue("another_user")
    words = refusal()
    assert words == (
        f"the directory run would decide about the command {PLANTED!r} and --import 'planted' and --tensorboard "
        "'/elsewhere', but its run.json is not signed with your key, so somebody else may have written these "
        "values; check them, and add --trust (trust=True) if you accept them, or specify them yourself."
    )
    # A command that is given anew is the user's. What else the directory names still is not.
    assert "about --import 'planted' and --tensorboard '/elsewhere', but" in refusal("train.py")
    # The modules that are given are imported besides those of the run.
    assert "about --import 'planted', but" in refusal("--import", "json", "--tensorboard", "here", "train.py")
    Path("planted.py").rename("unplanted.py")
    missing = resume("--import", "planted", "--tensorboard", "here", "train.py")
    assert "the module 'planted' cannot be imported" in str(missing.exception)
    Path("unplanted.py").rename("planted.py")
    assert not Path("ran").exists()
    monkeypatch.setattr(resumable, "_can_ask", lambda: True)
    arguments = ["run", "--resume", str(RUN), "--dry-run", "--tensorboard", "here"]
    denied = CliRunner().invoke(app, arguments, input="n\n")
    assert isinstance(denied.exception, ConfigurationError)
    assert f"  the command: {PLANTED}\n  --import: planted\nIs this what you want? [y/N]" in " ".join(
        denied.stderr.split(" ")
    )
    assert not Path("ran").exists()
    sys.path.append(str(tmp_path))
    try:
        accepted = CliRunner().invoke(app, arguments, input="y\n")
    finally:
        sys.path.remove(str(tmp_path))
    assert accepted.exit_code == 0, accepted.output
    assert Path("ran").exists()
    sys.modules.pop("planted")


def test_a_secret_that_somebody_else_has_chosen_protects_no_run(another_user: None) -> None:
    rewrite(command="paceline serve --workers 1")
    content = json.loads((RUN / "run.json").read_text())
    (RUN / "run.json").write_text(json.dumps({**content, "signature": ""}))
    write_secret("ab" * 32, RUN / "secret")
    refused = CliRunner().invoke(app, ["serve", "--resume", str(RUN)])
    assert isinstance(refused.exception, ConfigurationError)
    assert "would decide about the secret in" in str(refused.exception)


def test_the_identity_of_a_run_is_never_a_path_to_elsewhere() -> None:
    rewrite(lineage="../../elsewhere")
    assert "run.json cannot be read: its lineage is '../../elsewhere'" in refusal("train.py")


def test_a_run_that_was_trusted_once_is_this_users_from_then_on(another_user: None) -> None:
    assert "the command" in refusal()
    assert resume("--trust").exit_code == 0
    rewrite()  # as a run does when it goes on
    assert resume().exit_code == 0


def test_a_changed_description_is_not_the_one_that_was_signed_but_a_later_version_may_add_to_it() -> None:
    content = json.loads((RUN / "run.json").read_text())
    (RUN / "run.json").write_text(json.dumps({**content, "command": "paceline run evil.py"}))
    assert "the command 'paceline run evil.py'" in refusal()
    del content["signature"]
    content = dict(reversed(content.items())) | {"news": [1, {"b": 2.5, "a": None}]}
    (RUN / "run.json").write_text(json.dumps({**content, "signature": signature_of(content)}))
    assert resume().exit_code == 0


def test_a_condition_is_an_import_and_nothing_hides_in_a_message(another_user: None) -> None:
    rewrite(command="paceline run --sync conditions:pull=planted:f train.py \x1b[8m")
    file = read_run_file(RUN)
    assert file is not None
    write_run_file(file, RUN)
    content = json.loads((RUN / "run.json").read_text())
    (RUN / "run.json").write_text(json.dumps({**content, "signature": "0" * 64}))
    words = refusal()
    assert "\x1b" not in words
    assert "--sync 'conditions:pull=planted:f'" in words
    assert "--sync" in refusal("train.py")
    assert resume("--sync", "bsp", "train.py").exit_code == 0


def test_the_place_of_the_checkpoints_is_the_users_choice_in_python_too(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (RUN / CHECKPOINTS).rename(elsewhere)
    rewrite(settings=(ReportedSetting("--checkpoint-dir", str(elsewhere)),))
    assert make_job(workers=1, resume=RUN, dry_run=True).checkpoint_dir == str(elsewhere)
    content = json.loads((RUN / "run.json").read_text())
    (RUN / "run.json").write_text(json.dumps({**content, "signature": ""}))
    with pytest.raises(ConfigurationError, match=r"would decide about --checkpoint-dir .* add --trust"):
        make_job(workers=1, resume=RUN, dry_run=True)
    assert make_job(workers=1, resume=RUN, dry_run=True, trust=True).checkpoint_dir == str(elsewhere)
    job = make_job(workers=1, resume=RUN, dry_run=True, checkpoint_dir=elsewhere)
    assert job.checkpoint_dir == str(elsewhere)
    assert can_resume(RUN)  # --resume says what is missing


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_signed_directory_of_another_user_is_not_trusted() -> None:
    os.chown(RUN, 12345, 12345)
    assert "but it belongs to another user" in refusal()
    assert resume("--trust").exit_code == 0


def test_a_bucket_is_trusted_if_its_run_was_started_with_this_home(
    bucket: str, request: pytest.FixtureRequest
) -> None:
    shown(resume(run=bucket))
    shutil.rmtree("runs")
    request.getfixturevalue("another_user")
    refused = resume(run=bucket)
    assert isinstance(refused.exception, ConfigurationError)
    assert "the command 'paceline run" in str(refused.exception)
    shown(resume("--trust", run=bucket))
    shown(resume("train.py", run=bucket))


def test_a_job_that_its_scheduler_starts_again_resumes_a_run_that_has_a_checkpoint_and_not_finished() -> None:
    assert can_resume(RUN)
    finish()
    assert not can_resume(RUN)
    (RUN / "summary.json").write_text(json.dumps({"ended": "failed"}))
    assert can_resume(RUN)
    (RUN / CHECKPOINTS).rename("elsewhere")
    assert not can_resume(RUN)
    assert not can_resume(Path("elsewhere"))


def test_the_source_of_a_script_is_kept_in_utf_8_whatever_the_locale_is() -> None:
    keeps = "keep_source('# \\u00e9t\\u00e9', Path('run'))"
    program = f"from pathlib import Path; from paceline.run.resuming import keep_source; {keeps}"
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **ascii_only}, check=True)
    assert (RUN / "script.py").read_text(encoding="utf-8") == "# \u00e9t\u00e9"
