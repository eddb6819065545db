"""Script that runs one program under limits: standard library only, started by ``sandbox.py``.

The order matters: mount the read-only file system while mounting is permitted; fork into a new PID namespace;
in the child drop root, set the limits, chroot and exec the program. The parent waits and kills the PID
namespace at the time limit.

Exit status: 0, ``FAILED`` or ``TIMED_OUT`` for the program; any output on stderr is a failure of the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import signal
import struct
import sys

FAILED, TIMED_OUT = 10, 11
UNPRIVILEGED_ID = 65534

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SYS_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000  # the same number on every architecture
_READ_ONLY = 1
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

#: By machine: its number for seccomp, and the numbers of the system calls that fail with EPERM. They would
#: give access to keys of the user (add_key, request_key, keyctl) or memory that no limit counts (System V
#: shared memory, message queues and semaphores, memfd_create, memfd_secret, io_uring_setup), or hold the
#: kernel at a page fault, which attacks on it use (userfaultfd). Last: the number of ``socket``.
_REFUSED_CALLS = {
    "x86_64": (0xC000003E, (248, 249, 250, 29, 68, 64, 319, 447, 425, 323), 41),
    "aarch64": (0xC00000B7, (217, 218, 219, 194, 186, 190, 279, 447, 425, 282), 198),
    "riscv64": (0xC00000F3, (217, 218, 219, 194, 186, 190, 279, 447, 425, 282), 198),
}
#: Families of permitted sockets: AF_UNIX, AF_INET, AF_INET6. Others, such as AF_NETLINK, AF_ALG and AF_VSOCK,
#: reach the kernel or the host of a virtual machine.
_SOCKET_FAMILIES = (1, 2, 10)

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _checked(f"mount {target}", done)


def enter_namespaces() -> None:
    """Unshare mounts, PIDs, network, IPC and host name; without root, in a new user namespace."""
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS
    if os.geteuid() == 0:
        _checked("namespaces", _libc.unshare(flags))
        return
    user, group = os.geteuid(), os.getegid()
    _checked("namespaces", _libc.unshare(flags | _NEW_USER))
    # Map to a user id other than 0, so that exec drops the capability to mount.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{UNPRIVILEGED_ID} {user} 1"),
        ("gid_map", f"{UNPRIVILEGED_ID} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(root: str, job: dict) -> None:
    """Mount a read-only root with the interpreter and no user files, and a /tmp of limited size."""
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    size = 8 * job["output"]
    os.mkdir(root + "/tmp")
    # Mounted before the prefixes: a virtual environment may be in /tmp.
    _mount("tmpfs", root + "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={size},nr_inodes=1000,mode=1777")
    needed = [path for path in (*_SYSTEM, *job["paths"]) if os.path.exists(path)]
    bound: list[str] = []
    for path in sorted({os.path.realpath(path) for path in needed}):  # a directory before its contents
        if any(path == other or path.startswith(other + "/") for other in bound):
            continue
        bound.append(path)
        if os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
        else:
            _placeholder(root + path)
        _mount(path, root + path, "", _BIND | _REC)  # at the same path; no component of it is a link
    for link in {link for path in needed for link in links_on(path)}:
        if not os.path.lexists(root + link):
            os.makedirs(os.path.dirname(root + link), exist_ok=True)
            os.symlink(os.readlink(link), root + link)
    for device in _DEVICES:
        _placeholder(root + device)
    _set_attributes(root, _AT_RECURSIVE, added=_READ_ONLY | _NOSUID | _NODEV)
    _set_attributes(root + "/tmp", 0, removed=_READ_ONLY)
    for device in _DEVICES:
        _mount(device, root + device, "", _BIND)


def _set_attributes(path: str, how: int, added: int = 0, removed: int = 0) -> None:
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    attributes = (ctypes.c_uint64 * 4)(added, removed, 0, 0)
    number, size = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_size_t(32)
    done = _libc.syscall(number, -100, path.encode(), how, attributes, size)
    _checked("mount_setattr (Linux 5.12)", done)


def links_on(path: str) -> list[str]:
    """Return the symbolic links that resolving an absolute path goes through; each in a real directory."""
    links: list[str] = []
    current, rest = "/", [part for part in path.split("/") if part]
    while rest and len(links) < 40:  # the kernel's own limit
        part = rest.pop(0)
        if part == "..":
            current = os.path.dirname(current)
            continue
        step = os.path.join(current, part)
        if not os.path.islink(step):
            current = step
            continue
        links.append(step)
        target = os.readlink(step)
        current = "/" if target.startswith("/") else current
        rest = [part for part in target.split("/") if part not in ("", ".")] + rest
    return links


def _placeholder(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w"):
        pass


def become_program(job: dict) -> None:
    """Drop all privileges, set the limits and exec the program in ``/tmp``; does not return.

    Raises:
        OSError: a step failed.
    """
    # Processes that RLIMIT_NPROC counts besides: without root, the launcher in the same user namespace.
    others = int(os.geteuid() != 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        # A new user namespace counts processes from zero and permits chroot until exec.
        _checked("user namespace", _libc.unshare(_NEW_USER))
    _checked("parent death signal", _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    # The kernel refuses new user namespaces in a chroot, which would give capabilities back.
    os.chroot(".")
    os.chdir("/tmp")
    seconds = math.ceil(job["timeout"])
    processes = job["processes"] + others
    for limit, soft, hard in (
        (resource.RLIMIT_AS, job["memory"], job["memory"]),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, job["output"], job["output"]),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        # Keep a lower hard limit.
        known = resource.getrlimit(limit)[1]
        hard = hard if known == resource.RLIM_INFINITY else min(hard, known)
        resource.setrlimit(limit, (min(soft, hard), hard))
    _checked("no new privileges", _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    refuse_calls()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, 1024)
    devnull = os.open("/dev/null", os.O_WRONLY)
    if not os.path.exists(job["executable"]):
        raise FileNotFoundError(f"{job['executable']} is not in the file system of the sandbox")
    if not os.access(job["executable"], os.X_OK):
        raise PermissionError(f"the user of the sandbox cannot run {job['executable']}")
    os.dup2(devnull, 2)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    # numpy would start one thread per CPU and exceed the process limit.
    environment["OMP_NUM_THREADS"] = "1"
    os.execve(job["executable"], [job["executable"], "-I", "-B", "main.py"], environment)


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_calls() -> None:
    """Make ``_REFUSED_CALLS``, and sockets of other families, fail in this process and those that it starts.

    Raises:
        OSError: the numbers of the system calls of this machine are not known.
    """
    machine = os.uname().machine
    if machine not in _REFUSED_CALLS:
        raise OSError(f"the system calls of {machine} are not known")
    number, calls, new_socket = _REFUSED_CALLS[machine]
    load, equal, greater, answer = 0x20, 0x15, 0x35, 0x06  # struct sock_filter: code, jt, jf, k
    permit, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    instructions = [
        (load, "", "", 4),  # seccomp_data.arch
        (equal, "", "refuse", number),  # other tables of system calls, such as those of 32 bits, are refused
        (load, "", "", 0),  # seccomp_data.nr
        (greater, "refuse", "", 0x40000000),  # those of x32 too
        *((equal, "refuse", "", call) for call in calls),
        (equal, "", "permit", new_socket),
        (load, "", "", 16),  # the lower half of seccomp_data.args[0]: the family of the socket
        *((equal, "permit", "", family) for family in _SOCKET_FAMILIES),
        (answer, "", "", refuse),
        (answer, "", "", permit),
    ]
    last = len(instructions) - 1
    program = []
    for i, (code, if_true, if_false, k) in enumerate(instructions):
        skipped = {"": 0, "refuse": last - 2 - i, "permit": last - 1 - i}  # instructions to jump over
        program.append((code, skipped[if_true], skipped[if_false], k))
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    filters = _Filter(len(program), packed)
    done = _libc.prctl(_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filters), 0, 0)
    _checked("system call filter", done)


def main(job: dict) -> int:
    """Run ``program.py`` in the job's directory. Returns the exit status."""
    started: list[int] = []
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    os.umask(0o022)  # the user of the sandbox needs access to the directories that lead to its files
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    _checked("parent death signal", _libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))
    with open(os.path.join(job["directory"], "program.py"), "rb") as file:
        program = file.read()
    root = os.path.join(job["directory"], "root")
    enter_namespaces()
    build_root(root, job)
    os.chdir(root)
    path = root + "/tmp/main.py"
    with open(path, "wb") as copy:
        copy.write(program)
    os.chmod(path, 0o444)
    signal.setitimer(signal.ITIMER_REAL, job["timeout"])
    child = os.fork()
    if child == 0:
        try:
            become_program(job)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    started.append(child)
    if stopped:
        stop(stopped[0], None)
    _, status = os.waitpid(child, 0)
    result = TIMED_OUT if stopped else 0 if status == 0 else FAILED
    # The pid may be reused from here on.
    started.clear()
    return result


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
