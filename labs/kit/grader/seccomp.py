"""The system calls that a submission is refused: a filter in the kernel's classic BPF.

No lab needs them. They keep what outlives a batch (keyrings, shared memory), count towards no limit
(memfd_create), look into other processes, tell what others do with a file that all may read (locks, inotify),
or open parts of the kernel that namespaces do not divide.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

JOIN_SESSION_KEYRING, SET_SECCOMP, FILTER = 1, 22, 2
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH, column in CALLS
X32 = 0x40000000  # the bit of numbers in x86_64's second ABI, which has every call once more
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*, but for time: clone reads that bit as part of a signal
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: a network namespace does not bind AF_VSOCK
SET_PDEATHSIG = 1
LOCKS = (5, 6, 7, 36, 37, 38, 1024, 1026)  # F_GETLK to F_OFD_SETLKW, leases, notices: of files others see
CALLS = {
    name: (int(x86_64), int(aarch64))
    for name, x86_64, aarch64 in (
        entry.split()
        for entry in """
        keyctl 250 219; add_key 248 217; request_key 249 218; memfd_create 319 279; memfd_secret 447 447;
        shmget 29 194; shmat 30 196; shmctl 31 195; shmdt 67 197; msgget 68 186; msgsnd 69 189; msgrcv 70 188;
        msgctl 71 187; semget 64 190; semop 65 193; semctl 66 191; semtimedop 220 192; mq_open 240 180;
        unshare 272 97; setns 308 268; pivot_root 155 41; chroot 161 51; mount 165 40; umount2 166 39;
        open_tree 428 428; move_mount 429 429; fsopen 430 430; fsconfig 431 431; fsmount 432 432;
        fspick 433 433; mount_setattr 442 442; name_to_handle_at 303 264; open_by_handle_at 304 265;
        fanotify_init 300 262; quotactl 179 60; swapon 167 224; swapoff 168 225; acct 163 89; reboot 169 142;
        ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; process_madvise 440 440;
        kcmp 312 272; pidfd_getfd 438 438; bpf 321 280; userfaultfd 323 282; perf_event_open 298 241;
        io_uring_setup 425 425; io_uring_enter 426 426; io_uring_register 427 427; personality 135 92;
        kexec_load 246 104; kexec_file_load 320 294; init_module 175 105; finit_module 313 273;
        delete_module 176 106; syslog 103 116; flock 73 32; inotify_init1 294 26; inotify_add_watch 254 27;
        mincore 27 232; cachestat 451 451; fcntl 72 25;
        clone 56 220; clone3 435 435; prctl 157 167; socket 41 198
        """.split(";")
    )
}
PARTLY = ("clone", "clone3", "prctl", "socket", "fcntl")  # refused with some arguments, or in another way
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of words, with constants
NUMBER, ARCHITECTURE, ARGUMENT, SECOND = 0, 4, 16, 24  # in seccomp_data, of little-endian machines
ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x50000, 0x80000000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def program(machine: str) -> list[Instruction]:
    """Return the filter for a machine, by its name in uname. Raise OSError for one that is not known."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no filter of system calls for {machine}")
    return list(_instructions(machine))


def _instructions(machine: str) -> Iterator[Instruction]:
    architecture, column = ARCHITECTURES[machine]
    number = {name: numbers[column] for name, numbers in CALLS.items()}
    refused = (RETURN, 0, 0, REFUSED | errno.EPERM)
    yield from ((LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILLED))
    yield from ((LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILLED))
    for name in CALLS:
        if name not in PARTLY:
            yield from ((EQUAL, 0, 1, number[name]), refused)
    # glibc, which finds no clone3, calls clone, whose flags a filter can read
    yield from ((EQUAL, 0, 1, number["clone3"]), (RETURN, 0, 0, REFUSED | errno.ENOSYS))
    yield from (
        (EQUAL, 0, 3, number["clone"]),
        (LOAD, 0, 0, ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        refused,
    )
    yield from ((LOAD, 0, 0, NUMBER), (EQUAL, 0, 3, number["prctl"]), (LOAD, 0, 0, ARGUMENT))
    yield from ((EQUAL, 0, 1, SET_PDEATHSIG), refused)
    yield from ((LOAD, 0, 0, NUMBER), (EQUAL, 0, 1 + 2 * len(LOCKS), number["fcntl"]))
    yield (LOAD, 0, 0, SECOND)
    for command in LOCKS:
        yield from ((EQUAL, 0, 1, command), refused)
    yield from (
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 1 + len(FAMILIES) + 1, number["socket"]),
        (LOAD, 0, 0, ARGUMENT),
    )
    for left, family in enumerate(FAMILIES):
        yield (EQUAL, len(FAMILIES) - left, 0, family)
    yield from (refused, (RETURN, 0, 0, ALLOWED))


def load() -> None:
    """Refuse these calls to this process and all that it starts; it needs no_new_privs. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program(platform.machine()))
    forget_keys()
    text = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(text))
    if libc.prctl(SET_SECCOMP, FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def forget_keys() -> None:
    """Give this process an empty session keyring. Where keyctl is refused, so it is to a submission."""
    ctypes.CDLL(None).syscall(
        CALLS["keyctl"][ARCHITECTURES[platform.machine()][1]], JOIN_SESSION_KEYRING, None
    )
