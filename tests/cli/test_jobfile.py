from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.operations.jobfile import JobFileError, load_job
from sinks.postgres import PostgresSink
from tests.cli.jobs import Job, cli

ROOT = Path(__file__).parents[2]
PG = 'type = "postgres"\ndsn = "postgresql://app:${PASSWORD}@db/shop"\ntable = "orders"'


def toml(folder: Path, text: str) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    return str(file)


def test_every_kind_of_sink_and_the_checkpoint_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "s3cret$")
    (tmp_path / "mine.py").write_text("def upper(df):\n    return df\n")
    place = toml(
        tmp_path,
        f"""
        job = "orders"
        storage = "file://{tmp_path}/checkpoints"
        [checkpointing]
        interval = "10 s"
        min-pause = 1
        [[sinks]]
        {PG}
        transform = "{tmp_path}/mine.py:upper"
        connect_options = {{ sslmode = "require" }}
        max_dead_letters = 0.01
        [sinks.dead_letters]
        {PG}
        name = "bad"
        [[sinks]]
        type = "kafka"
        bootstrap_servers = "localhost:9092"
        topic = "out"
        options = {{ "compression.type" = "lz4" }}
        [[sinks]]
        type = "mysql"
        dsn = "mysql://app:${{PASSWORD}}@db/shop"
        table = "orders"
        name = "my"
        [[sinks]]
        type = "sqlalchemy"
        url = "sqlite:///{tmp_path}/a.db"
        table = "t"
        mode = "upsert"
        keys = ["id"]
        [[sinks]]
        type = "examples.custom_sink:FileSink"
        folder = "$${{literal}}"
        """,
    )
    coordinator = load_job(place)
    assert [type(sink).__name__ for sink in coordinator.sinks.values()] == [
        *("PostgresSink", "KafkaSink", "MySQLSink", "SqlAlchemySink", "FileSink", "PostgresSink")
    ]
    assert coordinator.sinks["orders"].dead_letters is coordinator.sinks["bad"]
    assert (coordinator.job, coordinator.config.interval, coordinator.config.min_pause) == ("orders", 10, 1)
    transform = coordinator.sinks["orders"].transform
    assert transform is not None
    assert transform.__name__ == "upper"
    assert str(coordinator.sinks["files"].folder) == "${literal}"  # type: ignore[attr-defined]


def test_tables_that_rows_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "s3cret$")
    sink = PG.replace('table = "orders"', 'mode = "upsert"\npayload_column = "row"')
    tables = '[sinks.tables.orders]\nkeys = ["id"]\n[sinks.tables.lines]\ntable = "l"\nkeys = ["id", "line"]'
    text = f'job = "shop"\nstorage = "file://{tmp_path}"\n[[sinks]]\n{sink}\n{tables}'
    [loaded] = load_job(toml(tmp_path, text)).sinks.values()
    assert isinstance(loaded, PostgresSink)
    assert loaded.describe_writing() == "upsert by id, or upsert by id, line; strategy auto"
    with pytest.raises(JobFileError, match=r"tables\['lines'\] takes the options"):
        load_job(toml(tmp_path, text.replace("table =", "tabel =")))


def test_a_sink_that_passes_keys_on_to_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "s3cret$")
    (tmp_path / "passing_on.py").write_text(
        "from sinks.postgres import PostgresSink\n\n\nclass Ours(PostgresSink):\n"
        "    def __init__(self, *args, team, **options):\n        super().__init__(*args, **options)\n"
    )
    ours = PG.replace("postgres", "passing_on:Ours", 1)
    text = f'job = "a"\nstorage = "file://{tmp_path}/checkpoints"\n[[sinks]]\n{ours}\nteam = "x"'
    assert list(load_job(toml(tmp_path, text)).sinks) == ["orders"]
    with pytest.raises(JobFileError, match=r"sink 1: .*unexpected keyword argument 'tabel'"):
        load_job(toml(tmp_path, f'{text}\ntabel = "y"'))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("job = ", r"is not TOML"),
        ('job = "a"', r"lacks sinks \(sections, \[\[sinks\]\]\)"),
        ('job = "a"\nsink = 1', r"unknown key 'sink'; did you mean 'sinks'\?"),
        ('job = 1\nsinks = [{type="kafka"}]', r'job has to be a text, job = "orders"'),
        (
            'job = "a"\n[[sinks]]\ntype = "postgress"',
            r"sink 1: there is no type 'postgress'; did you mean 'postgres'\?",
        ),
        ('job = "a"\n[[sinks]]\nname = "x"', r"sink 1 lacks type ="),
        (f'job = "a"\n[[sinks]]\n{PG}\ndead_letters = "x"', r"sink 1, dead_letters lacks type ="),
        (f'job = "a"\n[[sinks]]\n{PG}\ntabel = "x"', r"\(postgres\): unknown key 'tabel'; did you mean 'table'\?"),
        ('job = "a"\n[[sinks]]\ntype = "postgres"\ntable = "x"', r"sink 1: .*'dsn'"),
        ('job = "a"\n[[sinks]]\ntype = "postgres"\ndsn = 5\ntable = "x"', r"sink 1: dsn has to be a text"),
        (f'job = "a"\nstorage = "memory:x"\n[[sinks]]\n{PG}\nmode = "merge"', r"mode='merge' is not one of"),
        (f'job = "a"\n[[sinks]]\n{PG}', r"needs a storage"),
        (f'job = "a"\n[checkpointing]\nintervall = 1\n[[sinks]]\n{PG}', r"did you mean 'interval'"),
        (f'job = "a"\n[[sinks]]\n{PG}\nname = "${{PASSWORD}}"', r"sinks 1, name: 'PASSWORD' seems to be a secret"),
        ('job = "${NOT_THERE}"\nsinks = []', r"job: the environment variable 'NOT_THERE' is not set"),
        ('job = "a"\n[[sinks]]\ntype = "coordinator.errors:CheckpointGap"', r"no subclass of sinks.TwoPhaseCommitSink"),
        ('job = "a"\n[[sinks]]\ntype = "no_such:Sink"', r"cannot import no_such"),
        ('job = "a"\n[[sinks]]\ntype = "sinks.kafka:KafkaSnk"', r"has no 'KafkaSnk'; did you mean 'KafkaSink'\?"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.setenv("PASSWORD", "s3cret")
    place = toml(tmp_path, text)
    with pytest.raises(JobFileError, match=says) as raised:
        load_job(place)
    assert "s3cret" not in str(raised.value)
    assert cli("status", "--job", place, code=2).stdout == ""


def test_a_python_file_with_a_coordinator_or_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.py").write_text('JOB = "from-python"\n')
    (tmp_path / "job_of_mine.py").write_text(
        "from coordinator import CheckpointCoordinator\n"
        "from examples.custom_sink import FileSink\n"
        "import helper\n"
        "def make():\n"
        f"    return CheckpointCoordinator(helper.JOB, [FileSink('{tmp_path}')], 'file://{tmp_path}/c')\n"
        "coordinator = make()\n"
        "number = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    for place in (
        "job_of_mine.py",
        "job_of_mine.py:make",
        f"{tmp_path}/job_of_mine.py:coordinator",
        "job_of_mine:make",
    ):
        assert load_job(place).job == "from-python"
    for place, says in (
        ("job_of_mine.py:mak", "did you mean 'make'"),
        ("job_of_mine.py:number", "neither a CheckpointCoordinator"),
        ("nothing.py", "no file nothing.py"),
        ("no_such_module", "cannot import"),
        (":x", "write FILE.py:NAME"),
    ):
        with pytest.raises(JobFileError, match=says):
            load_job(place)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "coordinator = Coordinator()\n",
            r"cannot import .*job\.py: NameError: .*'Coordinator'.*job\.py, line 1\)",
        ),
        ("\ncoordinator = (\n", r"cannot import .*job\.py: SyntaxError: .*\(job\.py, line 2\)"),
        ("import no_such_module\n", r"cannot import .*job\.py: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def coordinator():\n    return {}['DSN']\n", r"job\.py: KeyError: 'DSN' \(.*job\.py, line 2\)"),
    ],
)
def test_code_of_a_job_that_fails_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "job.py").write_text(text)
    with pytest.raises(JobFileError, match=says):
        load_job(f"{tmp_path}/job.py")
    told = cli("status", "--job", f"{tmp_path}/job.py", code=2)
    assert len(told.stderr.splitlines()) == 1
    assert told.stdout == ""


@pytest.mark.parametrize(
    "start",
    [
        "    coordinator.write_stream(None).start()\n",
        "    run(lambda: coordinator.write_stream(None).start(), coordinator=coordinator)\n",
    ],
    ids=["start", "run"],
)
def test_a_job_file_that_starts_its_query_is_refused(tmp_path: Path, start: str) -> None:
    """Else a look at the job would be a second driver, which stops the first."""
    (tmp_path / "job.py").write_text(
        "from coordinator import CheckpointCoordinator, run\n"
        "from examples.custom_sink import FileSink\n"
        f"coordinator = CheckpointCoordinator('orders', [FileSink('{tmp_path}')], 'file://{tmp_path}/c')\n"
        "with coordinator:\n" + start
    )
    told = cli("status", "--job", f"{tmp_path}/job.py", code=2)
    assert "job.py starts its query when it is imported" in told.stderr
    assert '__name__ == "__main__"' in told.stderr


def test_no_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COORDINATOR_JOB", raising=False)
    assert "job.toml: No such file or directory. Name it by --job FILE" in cli("status", code=2).stderr
    (tmp_path / "job.yaml").write_text("job: orders\n")
    assert "job.yaml is neither FILE.toml nor FILE.py" in cli("status", "--job", "job.yaml", code=2).stderr


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_process_of_its_own_needs_no_spark(file_job: Job) -> None:
    file_job.run(1)
    (file_job.folder / "pyspark.py").write_text("raise RuntimeError('Spark was imported')\n")
    path = os.pathsep.join([str(file_job.folder), str(ROOT)])
    for command in (["checkpoints", "show"], ["in-doubt", "list"], ["resolve"]):
        done = run(*command, COORDINATOR_JOB=str(file_job.file), PYTHONPATH=path)
        assert done.returncode == 0, done.stderr + done.stdout


def test_closed_standard_streams(file_job: Job) -> None:
    """As some schedulers start programs."""
    file_job.run(1)
    for command, streams, code in (
        ("in-doubt list", "<&- >&- 2>&-", 0),
        ("in-doubt abort --all-orphans --fence", "<&-", 3),
    ):
        program = f'exec "$0" -m coordinator.cli {command} --job "$1" {streams}'
        done = subprocess.run(
            ["bash", "-c", program, sys.executable, str(file_job.file)], capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


def test_a_terminal_that_lacks_a_character(file_job: Job) -> None:
    file_job.file.write_text(file_job.file.read_text().replace('"orders"', '"заказы é"'), encoding="utf-8")
    file_job.run(1)
    done = run("status", "--job", str(file_job.file), PYTHONIOENCODING="ascii")
    assert r"Job '\u0437\u0430\u043a\u0430\u0437\u044b \xe9'" in done.stdout, done.stderr


def test_usage_and_completion() -> None:
    assert run("checkpoints", "lst").returncode == 2
    assert "Exit codes" in run("--help").stdout
    # the protocol of the completion script that `--install-completion` writes, for a program of this name
    asked = {"_COORDINATOR_COMPLETE": "complete_bash", "COMP_WORDS": "coordinator in-doubt ab", "COMP_CWORD": "2"}
    code = "import sys; sys.argv[0] = 'coordinator'; from coordinator.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | asked,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["abort"]
