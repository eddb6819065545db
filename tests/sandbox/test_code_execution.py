"""Programs that pass tests are rewarded; programs that mean harm do none, and end.

Files: ``sandbox/code.py``, ``sandbox/launcher.py``, ``sandbox/linux.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from groupwise.errors import ConfigError, RewardError
from groupwise.sandbox import SandboxLimits, SandboxResult, get_code_execution_reward
from groupwise.sandbox import code as code_module
from groupwise.sandbox.code import program_text
from groupwise.sandbox.launcher import links_on
from groupwise.sandbox.linux import LinuxSandbox

MB = 1 << 20


def isolation_works() -> bool:
    try:
        return LinuxSandbox().run("", "", SandboxLimits(5.0, 512 * MB, 8, MB)).status == "ok"
    except RewardError:
        return False


ISOLATED = isolation_works()
# Without namespaces only the limits remain to be tested.
needs_isolation = pytest.mark.skipif(not ISOLATED, reason="the kernel permits no user namespaces here")


def run(source: str, stdin: str = "", timeout: float = 20.0, memory: int = 256 * MB, output: int = 1 << 16):
    return LinuxSandbox().run(source, stdin, SandboxLimits(timeout, memory, 8, output))


def block(source: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"Here it is:\n```python\n{source}\n```\nDone."}]


@pytest.fixture(scope="module")
def reward():
    if not ISOLATED:
        pytest.skip("the kernel permits no user namespaces here")
    return get_code_execution_reward(timeout=20.0, memory_mb=256, max_output_kb=64)


def test_the_reward_is_the_share_of_passed_tests(reward):
    logged = {}
    double = "def f(x):\n    return 2 * x"
    tests = ["assert f(1) == 2", "assert f(2) == 5", "assert f('a') == 'aa'", "assert g(1)"]
    streams = [{"input": "2 3\n", "output": "5"}, {"input": "4 5\n", "output": "20"}]
    add = "print(sum(map(int, input().split())))"
    rewards = reward(
        [block(double), block(add), block("1 +"), block(double)],
        tests=[tests, streams, tests[:1], None],
        log_extra=logged.__setitem__,
    )
    # two of four, one of two, a syntax error, nothing to pass
    assert rewards == [0.5, 0.5, 0.0, None]
    assert logged == {"tests_passed": ["2/4", "1/2", "0/1", "0/0"]}


def test_spaces_at_line_ends_do_not_matter_and_lines_do(reward):
    tests = [[{"input": "", "output": "1 2\n3\n"}]]
    assert reward(["print('1 2  '); print(3); print()"], tests=tests) == [1.0]
    assert reward(["print('1 2 3')"], tests=tests) == [0.0]


def test_a_program_that_exits_before_the_test_does_not_pass(reward):
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"):
        assert reward([leave], tests=[["assert True"]]) == [0.0]


def test_the_right_output_of_a_failing_program_does_not_pass(reward):
    assert reward(["print(1, flush=True); 1 / 0"], tests=[[{"input": "", "output": "1"}]]) == [0.0]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\nor\n```\nb\n```", "b\n"),
        ("so\n```python\nx = 1\n", "x = 1\n"),
        ("print(1)", "print(1)"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("``` py \t\na\n```", "a\n"),
        pytest.param("```" + " " * 200_000 + "x", "```" + " " * 200_000 + "x", id="long"),  # not quadratic
    ],
)
def test_the_program_is_the_last_block_or_the_text(text, program):
    assert program_text(text) == program


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"timeout": 0}, "timeout=0 is out of range; allowed: > 0; nearest valid: any value above 0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"memory_mb": 0.5}, "memory_mb=0.5 is of type float; allowed: int"),
        ({"max_processes": 0}, "max_processes=0"),
        ({"max_output_kb": 0}, "max_output_kb=0"),
        ({"max_workers": True}, "max_workers=True"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    with pytest.raises(ConfigError) as caught:
        get_code_execution_reward(**arguments)
    assert said in str(caught.value)


@needs_isolation
def test_limits_too_low_for_any_program_are_refused():
    with pytest.raises(ConfigError, match="allow more memory"):
        get_code_execution_reward(memory_mb=2)


@pytest.mark.parametrize("tests", [[["assert 1", 3]], [[{"input": "1"}]]])
def test_invalid_tests_are_named(reward, tests):
    with pytest.raises(RewardError, match="of row 0 is invalid; allowed: a statement, or"):
        reward(["pass"], tests=tests)


def test_a_missing_column_is_named(reward):
    with pytest.raises(RewardError, match="no column 'tests'"):
        reward(["pass"], answers=[[]])


class Remote:
    """Runs programs in another way; ``failing``: cannot run any."""

    def __init__(self, failing=False):
        self.failing, self.calls = failing, []

    def run(self, program, stdin, limits):
        if self.failing:
            return SandboxResult("failed", "")
        self.calls.append((program, stdin, limits))
        return SandboxResult("ok", "1\n" if program == "print(1)" else stdin.upper())


def test_a_sandbox_of_the_user_runs_the_programs():
    remote = Remote()
    reward = get_code_execution_reward(sandbox=remote, memory_mb=64, max_workers=1)
    tests = [[{"input": "a", "output": "A"}, {"input": "b", "output": "b"}]]
    assert reward(["program"], tests=tests) == [0.5]
    limits = SandboxLimits(5.0, 64 * MB, 8, MB)
    assert remote.calls == [("print(1)", "", limits), ("program", "a", limits), ("program", "b", limits)]
    with pytest.raises(ConfigError, match="a program of one line fails"):
        get_code_execution_reward(sandbox=Remote(failing=True))


def refuse_namespaces(*_):
    raise RewardError("the sandbox could not be set up: namespaces: Operation not permitted")


def test_missing_namespaces_are_refused(monkeypatch):
    monkeypatch.setattr(code_module.LinuxSandbox, "run", refuse_namespaces)
    with pytest.raises(ConfigError, match=r"Operation not permitted.*or pass a sandbox"):
        get_code_execution_reward()


@pytest.mark.slow
@needs_isolation
def test_an_endless_loop_ends():
    assert run("while True: pass", timeout=0.5).status == "timeout"


@needs_isolation
def test_waiting_ends():
    assert run("import time; time.sleep(60)", timeout=0.5).status == "timeout"


@needs_isolation
def test_ignoring_signals_does_not_prevent_the_kill():
    source = "import signal, time\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    source += "  except (OSError, ValueError): pass\ntime.sleep(60)"
    assert run(source, timeout=0.5).status == "timeout"


@needs_isolation
def test_a_fork_bomb_ends_and_stays_small():
    source = "import os, time\ncount = 0\nwhile count < 100:\n  try:\n    if os.fork() == 0: time.sleep(60)\n"
    source += "    count += 1\n  except BlockingIOError: break\nprint(count, flush=True)\nos._exit(0)"
    status, output = run(source)
    # 8 processes, the first one included
    assert (status, output) == ("ok", "7\n")
    endless = run("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", timeout=0.5)
    assert endless.status == "timeout"


@needs_isolation
def test_threads_are_limited():
    source = "import os, threading, time\ncount = 0\ntry:\n  while count < 50:\n"
    source += "    threading.Thread(target=time.sleep, args=(60,)).start()\n    count += 1\n"
    source += "except RuntimeError: print(count, flush=True)\nos._exit(0)"
    # room for the stacks: the process limit must be what ends this
    assert run(source, memory=2048 * MB) == ("ok", "7\n")


@pytest.mark.slow
@needs_isolation
def test_huge_output_is_truncated():
    status, output = run("import sys\nwhile True: sys.stdout.write('x' * 10000)", output=50_000)
    assert status == "failed" and set(output) == {"x"} and len(output) <= 50_000
    status, _ = run("import sys\nwhile True:\n  try: print('x' * 10000)\n  except OSError: pass", timeout=0.5)
    assert status == "timeout"


@needs_isolation
def test_input_larger_than_a_pipe_is_read_or_left():
    given = "x" * MB
    assert run("print(len(input()))", given) == ("ok", f"{MB}\n")
    assert run("print(1)", given) == ("ok", "1\n")
    assert run("import time; time.sleep(60)", given, timeout=0.5).status == "timeout"


@needs_isolation
def test_memory_is_limited():
    assert run("x = bytearray(400 * 2**20)").status == "failed"
    assert run("x = bytearray(100 * 2**20)").status == "ok"


@needs_isolation
def test_the_environment_is_not_the_trainer_s(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source = "import os, glob\nprint(sorted(os.environ))\n"
    source += "for p in glob.glob('/proc/*/environ'): print(open(p).read())"
    status, output = run(source)
    assert (status, output) == ("ok", "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR']\n")


@pytest.mark.slow
@needs_isolation
def test_writing_outside_fails_and_inside_is_limited(tmp_path):
    tmp_path.chmod(0o777)
    prefix = Path(os.__file__).parent
    targets = [tmp_path / "a", Path.home() / "groupwise_escape", prefix / "x.py", "/x", "/usr/x", "/dev/x"]
    for target in map(str, targets):
        assert run(f"open({target!r}, 'w').write('x')").status == "failed"
        assert not os.path.exists(target)
    assert run("open('/tmp/a', 'w').write('x'); print(open('a').read())") == ("ok", "x\n")
    source = (
        "import os, sysconfig\nfor path in ('/', '/usr', sysconfig.get_path('purelib'), '/dev', '/tmp'):\n"
    )
    source += "  print(bool(os.statvfs(path).f_flag & os.ST_RDONLY))"
    assert run(source).output.split() == ["True"] * 4 + ["False"]
    # one file of more than the output limit, and many smaller ones
    assert run("open('a', 'wb').write(bytes(70_000))").status == "failed"
    assert run("for i in range(99): open(f'a{i}', 'wb').write(bytes(60_000))").status == "failed"


@needs_isolation
def test_files_of_the_user_are_not_visible(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hf_secret")
    secret.chmod(0o644)
    for path in (str(secret), "/etc/passwd", str(Path(__file__))):
        assert run(f"print(open({path!r}).read())").output == ""


@needs_isolation
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        assert run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)").status == "failed"
        with pytest.raises(TimeoutError):
            server.accept()
    # a list of the interfaces, without a socket of netlink: (index, name) of 16 + 24 bytes
    listing = (
        "import fcntl, socket, struct\nout = bytearray(400)\n"
        "import ctypes\nbuffer = (ctypes.c_char * 400).from_buffer(out)\n"
        "request = bytearray(struct.pack('iP', 400, ctypes.addressof(buffer)))\n"
        "fcntl.ioctl(socket.socket(), 0x8912, request)\n"
        "print(struct.unpack_from('i', request)[0])"
    )
    assert run(listing) == ("ok", "0\n")  # none is up


#: Runs programs, given as JSON on stdin, in the sandbox; the user's session keyring contains a secret. The
#: packages are entered without their ``__init__``, which needs what an interpreter of the system lacks.
DRIVER = """
import ctypes, json, os, sys, types

given = json.load(sys.stdin)
for name in ("groupwise", "groupwise.rewards", "groupwise.rewards.runtime"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(given["source"], *name.split("."))]
from groupwise.sandbox.linux import LinuxSandbox, SandboxLimits

for name, value in given["interpreter"].items():
    setattr(sys, name, value)
libc = ctypes.CDLL(None, use_errno=True)
key = -1
if os.uname().machine == "x86_64":
    libc.syscall(250, 1, None)  # a session keyring of its own
    key = libc.syscall(248, b"user", b"groupwise", b"hf_secret", 9, -3)
limits = SandboxLimits(20.0, 256 << 20, 8, 1 << 16)
print(json.dumps([LinuxSandbox().run(p.replace("KEY", str(key)), "", limits) for p in given["programs"]]))
"""


class SandboxUser(NamedTuple):
    """Runs programs in the sandbox as another user.

    number: of the user; None: that of the tests.
    python: an interpreter that the user can run.
    """

    number: int | None
    python: str

    def run(self, programs: list[str], **interpreter: str) -> list[tuple[str, str]]:
        """Status and output of each program; ``interpreter`` replaces attributes of ``sys``."""
        given = {"programs": programs, "interpreter": interpreter, "source": SOURCE}
        user = {} if self.number is None else {"user": self.number, "group": self.number, "extra_groups": []}
        command = [self.python, "-c", DRIVER]
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, timeout=60, cwd="/", **user
        )
        assert done.returncode == 0, done.stderr
        return [tuple(result) for result in json.loads(done.stdout)]


SOURCE = str(Path(code_module.__file__).parents[2])


@pytest.fixture(scope="module", params=["the user of the tests", "another user"])
def user(request):
    """The user of the tests, often root, and one without privileges."""
    if request.param == "the user of the tests":
        return SandboxUser(None, sys.executable)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for python in (sys.executable, "/usr/bin/python3"):
        other = SandboxUser(23456, python)
        try:
            assert other.run(["print(1)"]) == [("ok", "1\n")]
        except (AssertionError, OSError):
            continue
        return other
    pytest.skip("no interpreter that another user can run in the sandbox")


#: Programs that try to use memory, disk or secrets that no limit covers, with what they print in vain.
PROBES = {
    # Space on the disk of stdin and stdout beyond the end of the file, which the limit of file sizes permits.
    "allocate disk": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nbig = ctypes.c_long(1 << 26)\n"
        "print(*(libc.fallocate(fd, 1, ctypes.c_long(0), big) for fd in (0, 1)))",
        "-1 -1\n",
    ),
    "write to stdin": (
        "import os\ntry: print(os.write(0, b'x'))\nexcept OSError: print('refused')",
        "refused\n",
    ),
    # Shared memory of 1 GB, a message queue, a semaphore, a file in memory.
    "shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nsize = ctypes.c_size_t(1 << 30)\n"
        "print(libc.shmget(0, size, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600), "
        "libc.memfd_create(b'x', 0))",
        "-1 -1 -1 -1\n",
    ),
    # AF_NETLINK, AF_ALG, AF_VSOCK; those that stay: AF_UNIX, AF_INET, AF_INET6; page faults in user space.
    "sockets and page faults": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "userfaultfd = 323 if os.uname().machine == 'x86_64' else 282\n"
        "def refused(result): return int(result < 0 and ctypes.get_errno() == 1)\n"
        "print(*(refused(libc.socket(family, kind, 0)) for family, kind in "
        "((16, 3), (38, 5), (40, 1), (1, 1), (2, 1), (10, 1))), refused(libc.syscall(userfaultfd, 1)))",
        "1 1 1 0 0 0 1\n",
    ),
    # Read a key of the session by its number, and search the session keyring for it.
    "session keyring": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nbuffer = ctypes.create_string_buffer(64)\n"
        "print(libc.syscall(250, 11, KEY, buffer, 64), buffer.value)\n"
        "print(libc.syscall(250, 10, -3, b'user', b'groupwise', 0))",
        "-1 b''\n-1\n",
    ),
}


@pytest.mark.slow
@needs_isolation
def test_a_program_has_no_memory_disk_or_keys_beside_its_limits(user):
    probes = dict(PROBES)
    if os.uname().machine != "x86_64":  # the probe's numbers of system calls are those of x86-64
        del probes["session keyring"]
    results = user.run([program for program, _ in probes.values()])
    assert dict(zip(probes, results, strict=True)) == {
        name: ("ok", expected) for name, (_, expected) in probes.items()
    }


@pytest.fixture
def project(user):
    """A directory that any user can read, with a virtual environment made in it and a file of settings."""
    with tempfile.TemporaryDirectory(prefix="groupwise_project_") as name:
        os.chmod(name, 0o755)
        project = Path(name, "project")
        subprocess.run([user.python, "-m", "venv", "--without-pip", project], check=True)
        (project / ".env").write_text("HF_TOKEN=hf_secret")
        (project / "src").mkdir()
        (project / "src" / "settings.py").write_text("token = 'hf_secret'")
        yield project


@needs_isolation
def test_an_environment_in_the_project_directory_shows_no_file_of_the_project(user, project):
    looking = f"import os, sys\nprint(sys.prefix, sorted(os.listdir({str(project)!r})))"
    reading = f"print(open({str(project / '.env')!r}).read())"
    interpreter = {"executable": str(project / "bin" / "python"), "prefix": str(project)}
    shown = [name for name in ("bin", "lib", "lib64", "pyvenv.cfg") if (project / name).exists()]
    assert user.run([looking, reading], **interpreter) == [("ok", f"{project} {shown}\n"), ("failed", "")]


@needs_isolation
def test_an_environment_behind_symbolic_links_is_used(user, project):
    # A link to the environment, behind a link to its directory.
    (project.parent / "alias").symlink_to(project.parent, target_is_directory=True)
    (project.parent / "link").symlink_to("project", target_is_directory=True)
    prefix = project.parent / "alias" / "link"
    interpreter = {"executable": str(prefix / "bin" / "python"), "prefix": str(prefix)}
    source = "import sys, json, ctypes\nprint(sys.prefix != sys.base_prefix)"
    assert user.run([source], **interpreter) == [("ok", "True\n")]


def test_every_link_on_a_path_is_found(tmp_path):
    base = tmp_path.resolve()
    (base / "real" / "bin").mkdir(parents=True)
    (base / "alias").symlink_to("real")
    (base / "real" / "bin" / "python").symlink_to("../../alias/bin/python3")
    (base / "real" / "bin" / "python3").symlink_to(base / "alias" / "python3.11")
    links = [str(base / name) for name in ("alias", "real/bin/python", "real/bin/python3")]
    found = links_on(str(base / "alias" / "bin" / "python"))
    assert list(dict.fromkeys(found)) == links
    (base / "loop").symlink_to("loop")
    assert set(links_on(str(base / "loop"))) == {str(base / "loop")}


@needs_isolation
def test_privileges_cannot_be_regained():
    source = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    source += "for flags in (0x10000000, 0x20000, 0x40000000): print(libc.unshare(flags))\n"
    source += "print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.chroot(b'/tmp'))\n"
    for attempt in ("os.setuid(0)", "os.chroot('/tmp')"):
        source += f"try: {attempt}; print('won')\nexcept OSError: pass\n"
    # PR_GET_NO_NEW_PRIVS
    source += "print(libc.prctl(39, 0, 0, 0, 0))"
    assert run(source) == ("ok", "-1\n-1\n-1\n-1 -1\n1\n")


@needs_isolation
def test_a_daemon_left_behind_ends_with_the_program():
    # It leaves the process group, the session and its parent; its command line is visible from here.
    mark = f"groupwise-daemon-{os.getpid()}-{time.monotonic_ns()}"
    source = "import subprocess, sys\n"
    source += f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}],"
    source += " start_new_session=True)\nprint('left')"
    assert run(source) == ("ok", "left\n")
    assert [pid for pid in all_processes() if mark in command_line(pid)] == []


@needs_isolation
def test_a_trainer_that_is_killed_takes_the_program_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = os.fork()
    if trainer == 0:
        run("import time; time.sleep(60)", timeout=60.0)
        os._exit(0)
    try:
        wait_until(lambda: any("main.py" in command_line(pid) for pid in descendants(trainer)))
        started = descendants(trainer)
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
    wait_until(lambda: not any(command_line(pid) for pid in started))


def wait_until(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to pass within thirty seconds")


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    found, parents = [], {}
    for other in all_processes():
        try:
            parents[other] = int(Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    level = [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found
