"""What ``--help`` and ``--help-all`` show, what is known of other servers, and completion."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from corun.runtime.cli.command_texts import COMMAND_GROUPS, COMMANDS, SHELLS
from corun.runtime.cli.main import main
from corun.runtime.cli.parser import FOREIGN_FLAGS, command_parser
from corun.runtime.config.cluster import NOT_FOR_CLUSTERS, ClusterConfig
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from support.tables import PAGES, TABLES, tables_of, with_tables

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(argv)
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",)])
def test_corun_alone_shows_its_commands(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *argv)
    for command in COMMANDS:
        assert f"\n  {command} " in text


def test_every_command_is_in_one_group() -> None:
    grouped = [name for names in COMMAND_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_on_a_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *command.split(), "--help").splitlines()
    assert lines[0].startswith(f"usage: corun {command}")
    assert f"corun {command}" in lines[lines.index("Examples:") + 1]
    assert len(lines) <= 60
    assert max(map(len, lines)) < 80


def test_help_shows_the_most_used_options_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    short = printed(capsys, "serve", "--help")
    everything = printed(capsys, "serve", "--help-all")
    assert "corun serve --help-all shows all options" in short
    for flag in ("MODEL", "--lora-dir", "--port", "--api-key", "--memory-gib", "--config"):
        assert f"\n  {flag}" in short
    assert "--unsent-timeout-s" not in short
    for spec in option_specs(EngineConfig) + option_specs(ServeConfig):
        name = f"--[no-]{spec.key}" if spec.kind is bool else spec.flag
        assert re.search(rf"^  {re.escape(name)}(\s|$)", everything, re.MULTILINE), name


def test_a_cluster_has_every_option_of_its_engines(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "cluster", "--help-all")
    engine = [spec for spec in option_specs(EngineConfig) if spec.name not in NOT_FOR_CLUSTERS]
    own = [spec for spec in option_specs(ClusterConfig) if "cluster" in spec.commands]
    for spec in (*engine, *own, *option_specs(ServeConfig)):
        assert f"--[no-]{spec.key}" in text if spec.kind is bool else spec.flag in text


def test_flags_of_other_servers_name_flags_of_this_one() -> None:
    assert len(FOREIGN_FLAGS) <= 30
    own = {*command_parser("serve").flags(), *command_parser("cluster").flags()}
    for flag, answer in FOREIGN_FLAGS.items():
        assert flag not in own
        assert answer.startswith(("is called --", "is not needed: ", "is not there: "))
        assert set(re.findall(r"--[a-z-]+", answer)) <= own


@pytest.mark.parametrize("shell", SHELLS)
def test_a_completion_script_has_all_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for flag in command_parser("serve").flags():
        assert (f" -l {flag[2:]}" if shell == "fish" else flag) in script


BASH = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_corun
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["corun", "se"], {"serve"}),
        (["corun", "serve", "--lora-d"], {"--lora-dir"}),
        (["corun", "serve", "m", "--log-level", "wa"], {"warning"}),
        (["corun", "cluster", "st"], {"status"}),
        (["corun", "cluster", "status", "--contr"], {"--controller"}),
        (["corun", "env", "--po"], {""}),
    ],
)
def test_bash_completes(
    words: list[str], completed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["completion", "bash"])
    script = tmp_path / "corun.bash"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(["bash", "-c", BASH, "bash", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.rstrip("\n").split("\n")) == completed


def test_the_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = command_parser("serve")
    lengths = {}
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lengths[columns] = max(map(len, parser.help_text(shows_all=False).splitlines()))
    assert lengths[80] < 80 < lengths[200] <= 100


def test_completion_loads_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from corun.runtime.cli.main import main\n"
        "main(['completion', 'bash'])\n"
        "print(*({'torch', 'transformers', 'numba'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(repository: Path, name: str) -> None:
    page = (repository / name).read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: make tables"
    assert tables_of(page) == PAGES[name]


def test_every_option_has_a_line_and_a_sentence() -> None:
    table = TABLES["options"]()
    for spec in option_specs(EngineConfig) + option_specs(ServeConfig):
        assert f"`{spec.flag}" in table
        assert spec.help.endswith(".")


def test_every_limit_of_requests_is_on_the_page() -> None:
    of_http = [
        spec.flag
        for spec in option_specs(ServeConfig)
        if spec.name.startswith("max_") or spec.name.endswith("timeout_s")
    ]
    of_engine = (
        "--max-model-len",
        "--max-num-waiting",
        "--max-queue-s",
        "--max-stop-strings",
        "--max-logit-bias",
    )
    rows = TABLES["limits"]().splitlines()
    for flag in {*of_http, *of_engine} - {"--drain-timeout-s"}:
        assert [row for row in rows if row.endswith(f"| `{flag}` |")], flag
    assert [row for row in rows if "| no limit | `--max-queue-s` |" in row]


def test_only_what_is_between_marks_is_replaced() -> None:
    begin, end = "<!-- options: written by `make tables` -->", "<!-- end of options -->"
    page = with_tables(f"before\n{begin}\nold\n{end}\nafter\n")
    assert page == f"before\n{begin}\n{TABLES['options']()}{end}\nafter\n"
    assert with_tables(page) == page
